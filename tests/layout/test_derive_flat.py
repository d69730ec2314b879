"""Ranges of flattened shards as boxes: what ZeRO saves rests on these laws."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.test_derive import LAYOUTS, MESH
from torchdistpackage.layout.derive import local_shape, owner, owns, parts, runs
from torchdistpackage.layout.layout import Layout

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


def cells(box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(s.start, s.stop) for s in box)))


@given(shapes, st.data())
def test_runs_are_the_range_in_order(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    everything = list(itertools.product(*map(range, shape)))
    found = runs(shape, start, stop)
    walked = []
    for run in found:
        assert run.start == start + len(walked)
        box = [slice(o, o + n) for o, n in zip(run.offset, run.lengths, strict=True)]
        walked += cells(box)
        assert run.stop == start + len(walked)
    assert walked == everything[start:stop]
    assert len(found) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("num_slices", [1, 3, 7])
def test_slices_of_all_shards_tile_the_tensor_once(layout: Layout, num_slices: int):
    """And each part names the element that lies there in the flattened shard."""
    covered = []
    for rank in range(MESH.size):
        if not owns(layout, MESH, rank):
            continue
        whole = parts(layout, MESH, rank, 0, math.prod(local_shape(layout, MESH, rank)))
        place = {at: cell for part in whole for at, cell in of(part)}
        cuts = [round(i * len(place) / num_slices) for i in range(num_slices + 1)]
        for start, stop in itertools.pairwise(cuts):
            for part in parts(layout, MESH, rank, start, stop, once=True):
                for at, cell in of(part):
                    assert start <= at < stop and place[at] == cell
                    covered.append(cell)
    assert sorted(covered) == list(itertools.product(*(range(n) for n in layout.shape)))


def of(part):
    """(index in the flattened shard, cell of the global tensor) of each element of a part."""
    inside = set(cells(part.inside))
    every = itertools.product(*map(range, part.run.lengths))
    found = [part.run.start + i for i, cell in enumerate(every) if cell in inside]
    return list(zip(found, cells(part.where), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_one_rank_speaks_for_a_shard_and_it_holds_the_same(layout: Layout):
    for rank in range(MESH.size):
        speaker = owner(layout, MESH, rank)
        assert owns(layout, MESH, speaker)
        assert owner(layout, MESH, speaker) == speaker
        size = math.prod(local_shape(layout, MESH, rank))
        mine, its = (parts(layout, MESH, r, 0, size) for r in (rank, speaker))
        assert mine == its
