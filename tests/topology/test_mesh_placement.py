"""Groups that cross nodes are counted, and the busy ones warned about."""

import pytest

from tests.tells import tells
from torchdistpackage.topology.mesh import (
    DEFAULT_ORDER,
    Mesh,
    adjacent_on_a_host,
    advice,
    best_order,
    crossings,
)


def test_crossings_count_groups_with_ranks_on_two_nodes():
    mesh = Mesh((("data", 2), ("pipe", 2), ("tensor", 4)))
    found = {c.axis: (c.num_crossing, c.num_groups) for c in crossings(mesh, 8)}
    assert found == {"data": (8, 8), "pipe": (0, 8), "tensor": (0, 4)}
    assert advice(mesh, 8) == ()


def test_tensor_outermost_is_told_to_go_last():
    mesh = Mesh((("tensor", 4), ("data", 4)))
    (text,) = advice(mesh, 4)
    assert tells(text, "4", "4 tensor", "4 ranks", "4 ranks")
    assert "parallel.order ['data', 'tensor']" in text


def test_tensor_wider_than_a_node_is_told_to_shrink():
    (text,) = advice(Mesh((("tensor", 16),)), 8)
    assert text.endswith("use tensor 8 or less")


def test_best_order_keeps_the_quiet_axes():
    assert best_order(("tensor", "pipe", "context", "data")) == (
        "pipe",
        "data",
        "context",
        "tensor",
    )


def test_context_stays_inside_a_node_before_pipe():
    sizes = {"data": 2, "pipe": 2, "context": 2, "tensor": 2}
    mesh = Mesh(tuple((axis, sizes[axis]) for axis in DEFAULT_ORDER))
    assert {c.axis: c.num_crossing for c in crossings(mesh, 4)} == {
        "data": 8, "pipe": 8, "context": 0, "tensor": 0
    }  # fmt: skip
    (text,) = advice(Mesh((("context", 2), ("pipe", 4), ("tensor", 2))), 8)
    assert tells(text, "8", "8 context", "2 ranks", "8 ranks")
    assert "parallel.order ['pipe', 'context', 'tensor']" in text


@pytest.mark.parametrize(
    ("hosts", "number"), [("aaaa", 4), ("aabb", 2), ("aabbbb", 2), ("abab", 1), ("aaab", 1)]
)
def test_ranks_beside_each_other_on_a_host_are_counted_by_runs(hosts: str, number: int):
    assert adjacent_on_a_host([*hosts]) == number
