"""Which parameters share a bucket, on paper. No torch."""

from hypothesis import given
from hypothesis import strategies as st

from torchdistpackage.ddp.bucket_plan import SLIGHT
from torchdistpackage.ddp.zero.shard_bounds import ModuleParam, group_by_module

members = st.lists(
    st.builds(ModuleParam, st.sampled_from("abcd"), st.integers(0, 9), st.sampled_from([1, 2])),
    max_size=12,
)


@given(members, st.integers(1, 30))
def test_modules_stay_whole_and_keys_apart(held: list[ModuleParam], cap_bytes: int):
    numbers = group_by_module(held, cap_bytes)
    for a, i in zip(held, numbers, strict=True):
        for b, j in zip(held, numbers, strict=True):
            if a.key != b.key:
                assert i != j
            elif a.unit == b.unit:
                assert i == j


@given(members, st.integers(1, 30))
def test_a_bucket_is_above_the_cap_for_one_module_at_most(held: list[ModuleParam], cap_bytes: int):
    numbers = group_by_module(held, cap_bytes)
    for number in set(numbers):
        inside = [m for m, n in zip(held, numbers, strict=True) if n == number]
        units = {m.unit: sum(x.num_bytes for x in inside if x.unit == m.unit) for m in inside}
        rest = sum(units.values()) - max(units.values())
        assert sum(units.values()) <= cap_bytes or rest <= cap_bytes * SLIGHT


def test_the_last_module_is_in_the_first_bucket_with_its_bias_and_without_its_neighbours():
    layers = [ModuleParam(f"{i}", size, 0) for i in range(3) for size in (400, 4)]
    assert group_by_module(layers, 500) == [2, 2, 1, 1, 0, 0]
    assert group_by_module(layers, 900) == [1, 1, 0, 0, 0, 0]


def test_what_is_slight_travels_with_the_large_one_that_follows_it():
    """As of an optimizer alone, whose biases have no name that says whose they are."""
    layers = [ModuleParam(f"{i} {size}", size, 0) for i in range(3) for size in (500, 4)]
    assert group_by_module(layers, 500) == [2, 2, 1, 1, 0, 0]
    assert group_by_module(layers, 60) == [5, 4, 3, 2, 1, 0]
