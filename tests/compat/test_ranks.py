"""Rank lists agree with the mesh of the same sizes, and nobody is left out."""

import itertools

import pytest

from tests.tells import facts_pattern
from torchdistpackage.compat.torchdistpackage.ranks import gen_groups, gen_inner_ranks
from torchdistpackage.errors import TopologyError
from torchdistpackage.topology.mesh import Mesh

SIZES = [(4,), (2, 3), (3, 2, 4), (1, 4, 1), (2, 1, 2)]


def called(world_size: int, group_size: float, strides) -> list[list[int]]:
    groups: list[list[int]] = []
    gen_groups(world_size, group_size, strides, groups.append)
    return groups


@pytest.mark.parametrize(("sizes", "axis"), [(s, a) for s in SIZES for a in range(len(s))])
def test_groups_are_those_of_the_mesh(sizes: tuple[int, ...], axis: int):
    names = "abc"
    mesh = Mesh(tuple(zip(names, sizes, strict=False)))
    groups = called(mesh.size, sizes[axis], list(sizes[axis + 1 :]))
    assert sorted(groups) == sorted(list(ranks) for ranks in mesh.groups((names[axis],)))
    assert sorted(itertools.chain(*groups)) == list(range(mesh.size))


def test_calls_come_by_inner_offset_then_outwards():
    """Groups are made in the order of the calls, so it is part of the behaviour."""
    assert called(8, 2, [2]) == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert called(8, 2, [2, 2]) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert called(4, 2, None) == called(4, 2, []) == [[0, 1], [2, 3]] == gen_inner_ranks(4, 2)


def test_whole_floats_pass():
    """`world_size / 2` is a float, and is how sizes are computed."""
    assert called(8, 8 / 2, [2.0]) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert gen_inner_ranks(4, 4 / 2) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("world_size", "group_size", "strides", "text"),
    [
        (6, 4, None, "groups of 4 ranks do not tile 6 ranks; use a multiple of 4"),
        (8, 3, [2], "groups of 3 ranks, 2 apart, do not tile 8 ranks; use a multiple of 6"),
        (8, 2.5, [2], r"size 2\.5"),
        (8, 2, [0], "size 0"),
        (8, 0, None, "size 0"),
    ],
)
def test_sizes_that_leave_ranks_over_are_refused_before_any_call(
    world_size, group_size, strides, text
):
    groups: list[list[int]] = []
    with pytest.raises(TopologyError, match=text):
        gen_groups(world_size, group_size, strides, groups.append)
    assert groups == []


def test_inner_ranks_refuse_a_remainder():
    with pytest.raises(TopologyError, match=facts_pattern("4 ranks", "7 ranks")):
        gen_inner_ranks(7, 4)
