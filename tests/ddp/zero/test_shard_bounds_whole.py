"""Which optimizers may be cut, and how whole parameters are shared out: arithmetic, no torch."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tells import facts_pattern
from torchdistpackage.ddp.zero.shard_bounds import (
    ELEMENTWISE,
    MATRIXWISE,
    REFUSED,
    requires_whole_params,
)
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.partition import greedy_partition

SIZES = st.lists(st.integers(0, 1000), max_size=40)


def made(name: str, module: str = "torch.optim.some", base: type = object, **options: object):
    kind = type(name, (base,), {"__module__": module, "param_groups": [options]})
    return kind()


@given(SIZES, st.integers(1, 9))
def test_no_rank_owns_more_than_the_mean_and_one_parameter(sizes: list[int], num_ranks: int):
    """Balanced over all of them: an embedding does not leave the later ranks idle."""
    shares = greedy_partition(sizes, num_ranks)
    totals = [sum(sizes[i] for i in share) for share in shares]
    assert sum(totals) == sum(sizes)
    assert max(totals) <= Fraction(sum(sizes), num_ranks) + max(sizes, default=0)
    # within 4/3 of the best there is, which no less than the mean or the largest can be
    most = max(Fraction(sum(sizes), num_ranks), max(sizes, default=0))
    pair = sorted(sizes, reverse=True)[num_ranks - 1 : num_ranks + 1]
    assert max(totals) <= Fraction(4, 3) * max(most, sum(pair) if len(pair) == 2 else 0)


def test_every_rank_finds_the_same_owners():
    sizes = [7, 7, 7, 3, 3, 0, 9]
    expected = ((4, 6), (0, 2), (1, 3, 5))
    assert greedy_partition(sizes, 3) == greedy_partition(tuple(sizes), 3) == expected
    assert greedy_partition(sizes, 1) == (tuple(range(len(sizes))),)


@pytest.mark.parametrize("name", sorted(ELEMENTWISE))
def test_elementwise_classes_of_torch_may_be_cut(name: str):
    assert requires_whole_params(made(name)) is False
    assert requires_whole_params(made(name), split=["w"]) is False
    assert requires_whole_params(made(name), whole=True) is True


@pytest.mark.parametrize("name", sorted(MATRIXWISE))
def test_matrixwise_classes_get_whole_parameters_or_a_reason(name: str):
    assert requires_whole_params(made(name)) is True
    with pytest.raises(LayoutError, match="rows and columns"):
        requires_whole_params(made(name), whole=False)
    with pytest.raises(LayoutError, match=r"1 are split over ranks of the model: blocks\.0\.w"):
        requires_whole_params(made(name), split=["blocks.0.w"])


def test_what_is_not_known_gets_whole_parameters_unless_the_user_knows_it():
    own = made("Lion", "somebody.optim")
    assert requires_whole_params(own) is True
    assert requires_whole_params(own, whole=False) is False
    made_from_adam = made("Adam", "somebody.optim", base=type(made("Adam")))
    assert requires_whole_params(made_from_adam) is True, "a class made from one may do anything"
    with pytest.raises(LayoutError, match="whole=False if its update is element-wise"):
        requires_whole_params(own, split=["w"])


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_sharded_is_refused_with_the_reason(name: str):
    reason = f"{name} cannot be sharded: {REFUSED[name]}"
    for whole in (None, True, False):
        with pytest.raises(LayoutError, match=reason):
            requires_whole_params(made(name), whole)
    with pytest.raises(LayoutError, match=REFUSED[name]):
        requires_whole_params(made("Mine", "somebody", base=type(made(name))))


def test_a_step_that_wants_gradients_itself_is_refused():
    with pytest.raises(LayoutError, match=facts_pattern("group 0", "SGD")):
        requires_whole_params(made("SGD", differentiable=True))


def test_every_class_of_torch_is_in_one_of_the_lists():
    optim = pytest.importorskip("torch.optim")
    classes = {
        name
        for name, kind in vars(optim).items()
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer)
    }
    assert classes - {"Optimizer"} == ELEMENTWISE | MATRIXWISE | REFUSED.keys()
