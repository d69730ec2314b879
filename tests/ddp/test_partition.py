"""Shares cover everything once, differ little, and are the same for the same sizes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tells import facts_pattern
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.partition import greedy_partition, partition_params

sizes = st.lists(st.integers(0, 1000), max_size=40)


@given(sizes, st.integers(1, 9))
def test_each_is_in_one_share_in_order(sizes, num_shares):
    shares = greedy_partition(sizes, num_shares)
    assert len(shares) == num_shares
    assert sorted(itertools.chain(*shares)) == list(range(len(sizes)))
    assert all(list(share) == sorted(share) for share in shares)


@given(st.lists(st.integers(1, 30), max_size=7), st.integers(1, 3))
def test_the_fullest_share_is_at_most_four_thirds_of_the_best(sizes, num_shares):
    shares = greedy_partition(sizes, num_shares)
    best = min(
        max(
            sum(s for s, at in zip(sizes, places, strict=True) if at == i)
            for i in range(num_shares)
        )
        for places in itertools.product(range(num_shares), repeat=len(sizes))
    )
    fullest = max(sum(sizes[i] for i in share) for share in shares)
    assert 3 * num_shares * fullest <= (4 * num_shares - 1) * best


def test_one_huge_parameter_leaves_the_rest_to_the_others():
    assert greedy_partition([900, 10, 20, 30, 40], 3) == ((0,), (1, 4), (2, 3))


def test_no_share_is_no_partition():
    with pytest.raises(LayoutError, match=facts_pattern("2 parameters", "0 ranks")):
        greedy_partition([1, 2], 0)


def test_parameters_are_parted_by_name_or_in_lists():
    torch = pytest.importorskip("torch")
    nn = torch.nn
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(4, 32)})
    model["d"] = model["a"]  # tied: counts once
    parts = partition_params(model, 2)
    named = partition_params(model, 2, return_dict=True)
    assert [[id(p) for p in part] for part in parts] == [
        [id(p) for p in part.values()] for part in named
    ]
    assert {name for part in named for name in part} == dict(model.named_parameters()).keys()
    assert [sum(p.numel() for p in part) for part in parts] == [160, 144]
    assert len(partition_params(nn.Linear(2, 2), 5)) == 5
