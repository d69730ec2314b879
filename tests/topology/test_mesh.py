"""Laws of the mesh; none needs a process."""

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdistpackage.errors import TopologyError
from torchdistpackage.topology.mesh import Mesh

meshes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(
    lambda sizes: Mesh(tuple((f"a{i}", n) for i, n in enumerate(sizes)))
)


@given(meshes)
def test_coord_and_rank_are_inverse(mesh: Mesh):
    coords = [mesh.coord(rank) for rank in range(mesh.size)]
    assert [mesh.rank(coord) for coord in coords] == list(range(mesh.size))


@given(meshes, st.data())
def test_groups_are_the_ranks_that_differ_only_along_the_axes(mesh: Mesh, data: st.DataObject):
    axes = data.draw(st.sets(st.sampled_from(mesh.names))) if mesh.names else set()
    others = set(mesh.names) - axes

    def key(rank: int) -> tuple[int, ...]:
        coord = mesh.coord(rank)
        return tuple(coord[name] for name in sorted(others))

    slow = [tuple(r for r in range(mesh.size) if key(r) == key(rank)) for rank in range(mesh.size)]
    assert [tuple(mesh.group(rank, axes)) for rank in range(mesh.size)] == slow
    assert [tuple(g) for g in mesh.groups(axes)] == list(dict.fromkeys(slow))


def test_index_along_two_axes_counts_the_first_slowest():
    mesh = Mesh((("data", 2), ("pipe", 3), ("tensor", 2)))
    for rank in range(mesh.size):
        coord = mesh.coord(rank)
        assert mesh.index(rank, "tensor", "data") == coord["tensor"] * 2 + coord["data"]
        assert mesh.index(rank, "absent") == 0


def test_neighbours_wrap():
    mesh = Mesh((("pipe", 3), ("tensor", 2)))
    assert [mesh.neighbour(r, "pipe") for r in range(6)] == [2, 3, 4, 5, 0, 1]
    assert [mesh.neighbour(r, "pipe", -1) for r in range(6)] == [4, 5, 0, 1, 2, 3]


def test_whole_floats_are_sizes_and_equal_ints():
    assert Mesh((("data", 4.0),)) == Mesh((("data", 4),))
    for size in (3.5, 0, -2, True, "4", float("nan"), None):
        with pytest.raises(TopologyError, match="axis data has size"):
            Mesh((("data", size),))  # type: ignore[arg-type]


def test_an_axis_named_twice_is_refused():
    with pytest.raises(TopologyError, match="data is listed twice"):
        Mesh((("data", 2), ("data", 2)))


def test_a_rank_outside_is_refused_with_the_numbers():
    with pytest.raises(TopologyError, match=r"rank 4 .* 4 ranks \(data=2 x tensor=2\); use 0 to 3"):
        Mesh((("data", 2), ("tensor", 2))).coord(4)


@pytest.mark.parametrize("order", list(itertools.permutations(("data", "pipe", "tensor"))))
def test_a_million_ranks_answer_in_milliseconds(order: tuple[str, ...]):
    sizes = {"data": 1024, "pipe": 16, "tensor": 64}
    mesh = Mesh(tuple((name, sizes[name]) for name in order))
    fastest = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        groups = [
            mesh.group(777_777, axes) for axes in (*((n,) for n in order), ("pipe", "tensor"))
        ]
        mesh.group(777_777, order)
        fastest = min(fastest, time.perf_counter() - start)
    assert [len(g) for g in groups] == [*(sizes[n] for n in order), 1024]
    assert all(777_777 in g for g in groups)
    assert fastest < 0.010
