"""The cut of a bucket, on paper. No torch."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdistpackage.ddp.zero.shard_bounds import (
    SLICE_BYTES,
    ShardRange,
    bounds_of,
    even_bounds,
    pieces,
)
from torchdistpackage.errors import LayoutError


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Offsets and sizes of members, with gaps between them."""
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))
    gaps = draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
    offsets, end = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        offsets.append(end)
        end += size + gap
    return offsets, sizes


ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])
"""Of float8 to complex128."""


@given(lines(), st.integers(1, 7), ITEMSIZES)
def test_every_element_has_one_owner(
    line: tuple[list[int], list[int]], num_ranks: int, itemsize: int
):
    offsets, sizes = line
    bounds = even_bounds(offsets[-1] + sizes[-1], num_ranks, itemsize)
    owned = [
        (piece.member, element)
        for index in range(num_ranks)
        for piece in pieces(offsets, sizes, bounds, index)
        for element in range(piece.start, piece.stop)
    ]
    assert sorted(owned) == [(m, e) for m, size in enumerate(sizes) for e in range(size)]


@given(lines(), st.integers(1, 7), ITEMSIZES)
def test_a_piece_lies_in_the_slice_where_it_lies_on_the_line(
    line: tuple[list[int], list[int]], num_ranks: int, itemsize: int
):
    offsets, sizes = line
    bounds = even_bounds(offsets[-1] + sizes[-1], num_ranks, itemsize)
    for index in range(num_ranks):
        for piece in pieces(offsets, sizes, bounds, index):
            assert bounds[index] + piece.offset == offsets[piece.member] + piece.start
            assert piece.offset + piece.num_elements <= bounds[index + 1] - bounds[index]


@given(st.integers(0, 5000), st.sampled_from([1, 2, 3, 5, 8, 24]), ITEMSIZES)
def test_even_slices_are_equal_aligned_and_padded_by_one_step_a_rank_at_most(
    n: int, num_ranks: int, itemsize: int
):
    bounds = even_bounds(n, num_ranks, itemsize)
    step = SLICE_BYTES // itemsize
    assert {b - a for a, b in pairwise(bounds)} == {bounds[1]}
    assert all(bound * itemsize % SLICE_BYTES == 0 for bound in bounds)
    assert n <= bounds[-1] < n + num_ranks * step


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=24), ITEMSIZES)
def test_slices_of_whole_parameters_are_aligned_and_of_one_length_where_that_is_nearly_so(
    lengths: list[int], itemsize: int
):
    bounds, step = bounds_of(lengths, itemsize), SLICE_BYTES // itemsize
    found = [b - a for a, b in pairwise(bounds)]
    assert all(bound * itemsize % SLICE_BYTES == 0 for bound in bounds)
    assert all(have >= need for have, need in zip(found, lengths, strict=True))
    tight = [-(-need // step) * step for need in lengths]
    if len({*found}) > 1:
        assert found == tight
        assert max(tight) * len(tight) > sum(tight) * 17 / 16
    else:
        assert sum(found) <= sum(tight) * 17 / 16


def test_uneven_bounds_may_leave_a_rank_empty():
    assert pieces([0, 4], [3, 2], [0, 4, 4, 6], 0) == (ShardRange(0, 0, 3, 0),)
    assert pieces([0, 4], [3, 2], [0, 4, 4, 6], 1) == ()
    assert pieces([0, 4], [3, 2], [0, 4, 4, 6], 2) == (ShardRange(1, 0, 2, 0),)


@pytest.mark.parametrize(
    ("offsets", "sizes", "bounds", "text"),
    [
        ([0, 2], [3, 2], [0, 4], "overlap"),
        ([0, 3], [3, 2], [0, 5, 4], "not ascending"),
        ([0, 3], [3, 2], [0, 2, 4], "without an owner"),
        ([0, 3], [3, 2], [1, 5], "without an owner"),
    ],
)
def test_what_cannot_be_cut_is_said(
    offsets: list[int], sizes: list[int], bounds: list[int], text: str
):
    with pytest.raises(LayoutError, match=text):
        pieces(offsets, sizes, bounds, 0)
