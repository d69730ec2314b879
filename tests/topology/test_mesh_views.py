"""Dense and expert view of one world, and the names of their groups."""

import itertools

import pytest

from torchdistpackage.errors import TopologyError
from torchdistpackage.topology.mesh import SHOWN_GROUPS, topology, unknown_axes


@pytest.mark.parametrize("order", list(itertools.permutations(("data", "pipe", "tensor"))))
def test_groups_of_every_order_tile_the_world(order):
    sizes = {"data": 4, "pipe": 3, "tensor": 2}
    topo = topology([(n, sizes[n]) for n in order], 24, expert=2)
    expected = {**sizes, "model": 6, "global": 24, "moe_ep": 2, "moe_dp": 2}
    for mode, size in expected.items():
        groups = {tuple(topo.group(rank, mode)) for rank in range(24)}
        assert sorted(r for g in groups for r in g) == list(range(24))
        assert {len(g) for g in groups} == {size}


def test_expert_blocks_are_contiguous_in_data_and_replicas_strided():
    topo = topology([("data", 8)], 8, expert=4)
    assert list(topo.group(5, "moe_ep")) == [4, 5, 6, 7]
    assert list(topo.group(5, "moe_dp")) == [1, 5]


@pytest.mark.parametrize("open_size", [None, -1, "auto"])
def test_one_size_is_inferred(open_size):
    topo = topology([("data", open_size), ("tensor", 4.0)], 12)
    assert topo.dense.axes == (("data", 3), ("tensor", 4))


@pytest.mark.parametrize(
    ("axes", "world", "text"),
    [
        ([("data", None), ("pipe", None)], 4, "both left open"),
        ([("data", None), ("pipe", 3)], 8, "does not divide the 8 ranks"),
        ([("data", 2), ("pipe", 2)], 8, "is 4 ranks, but the world has 8"),
        ([("data", 3.5), ("pipe", 2)], 7, "axis data has size 3.5"),
        (("data", 2), 2, r"the axes are \('data', 2\); give a list of pairs such as"),
        ("data", 2, "the axes are 'data'; give a list of pairs"),
        ([["data"], ["pipe", 2]], 2, "give a list of pairs"),
    ],
)
def test_what_does_not_tile_is_refused(axes, world, text):
    with pytest.raises(TopologyError, match=text):
        topology(axes, world)


def test_no_data_axis_is_fine():
    topo = topology([("pipe", 2), ("tensor", 2)], 4)
    assert list(topo.group(1, "model")) == [0, 1, 2, 3]
    assert list(topo.group(1, "moe_dp")) == [1]


def test_expert_must_divide_data():
    with pytest.raises(
        TopologyError, match=r"expert=3 must divide .* 4 ranks; valid sizes: 1, 2, 4"
    ):
        topology([("data", 4)], 4, expert=3)


def test_an_unknown_name_is_answered_with_the_names():
    with pytest.raises(TopologyError, match=r"no group 'pipeline'.*data, pipe, model, global"):
        topology([("data", 2), ("pipe", 2)], 4).group(0, "pipeline")


def test_a_mapping_is_read_as_pairs_in_its_order():
    pairs = [("tensor", 2), ("data", None)]
    assert topology(dict(pairs), 8) == topology(pairs, 8)
    assert topology(dict(pairs), 8) != topology(dict(pairs[::-1]), 8)


def test_unknown_axes_are_told_with_the_known_ones():
    assert unknown_axes(["pipe", "data", "context", "tensor"]) == ""
    text = unknown_axes(["rows", "tensr", "data"])
    assert "'rows'" in text and "'tensr' (did you mean 'tensor'?)" in text
    assert "data, pipe, context, tensor" in text
    for taken in ("model", "global", "expert", "moe_dp"):
        with pytest.raises(TopologyError, match=f"'{taken}' is not an axis"):
            topology([("data", 2), (taken, 1)], 2)


def test_groups_are_listed_as_far_as_they_can_be_read():
    """The 16 ranks of the earlier package's page, in its order."""
    topo = topology([("pipe", 2), ("tensor", 2), ("data", 4)], 16)
    lines = topo.describe(["pipe", "tensor", "data", "model"]).splitlines()
    assert lines[:2] == ["group pipe, ranks: [0, 8]", "group pipe, ranks: [1, 9]"]
    assert lines[8:10] == ["group tensor, ranks: [0, 4]", "group tensor, ranks: [1, 5]"]
    assert lines[16] == "group data, ranks: [0, 1, 2, 3]"
    assert lines[20] == "group model, ranks: [0, 4, 8, 12]" and len(lines) == 24
    many = topology([("data", 2), ("tensor", 4096)], 8192).describe(["data", "tensor"])
    assert many.splitlines()[SHOWN_GROUPS] == f"group data: {4096 - SHOWN_GROUPS} more"
