"""The cut is the best there is, found by trying all of them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.split import split_by_cost, split_evenly


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 6))
def test_no_other_cut_has_a_smaller_largest_stage(costs, num_stages):
    ranges = split_by_cost(costs, num_stages)
    assert len(ranges) == num_stages
    assert [i for r in ranges for i in r] == list(range(len(costs)))
    used = min(num_stages, len(costs))
    assert all(len(r) > 0 for r in ranges[:used])
    cuts = itertools.combinations(range(1, len(costs)), used - 1) if used else []
    best = min(
        (
            max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs))))
            for cut in cuts
        ),
        default=0,
    )
    assert max((sum(costs[i] for i in r) for r in ranges), default=0) == best


def test_among_equal_cuts_the_more_even_one_is_taken():
    assert split_by_cost([5, 1, 1, 1, 1], 3) == (range(1), range(1, 3), range(3, 5))
    assert [len(r) for r in split_by_cost([1] * 7, 4)] in (
        [2, 2, 2, 1],
        [1, 2, 2, 2],
        [2, 1, 2, 2],
        [2, 2, 1, 2],
    )


@given(st.integers(0, 30), st.integers(1, 9))
def test_even_lengths_differ_by_at_most_one(num_pieces, num_stages):
    ranges = split_evenly(num_pieces, num_stages)
    assert [i for r in ranges for i in r] == list(range(num_pieces))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


def test_nonsense_is_refused():
    with pytest.raises(ScheduleError, match="into 0 stages"):
        split_by_cost([1.0], 0)
    with pytest.raises(ScheduleError, match="lowest: -1"):
        split_by_cost([1.0, -1.0], 1)
