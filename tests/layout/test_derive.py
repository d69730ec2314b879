"""The laws that initial weights, gradient sums, norms and checkpoints rest on."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import (
    blocks,
    gradient_axes,
    gradient_ranks,
    local_shape,
    local_slices,
    num_replicas,
    owner,
    owns,
    placements,
    replica_ranks,
)
from torchdistpackage.layout.layout import HeadSplit, Layout
from torchdistpackage.topology.mesh import Mesh

MESH = Mesh((("data", 2), ("pipe", 2), ("context", 3), ("tensor", 2)))
LAYOUTS = [
    Layout("whole", (12, 6)),
    Layout("rows", (12, 6), (("tensor",), ())),
    Layout("two axes", (12, 6), (("data", "tensor"), ())),
    Layout("both dims", (12, 6), (("tensor",), ("context",))),
    Layout("fused", (12, 6), (("tensor",), ()), parts=((4, 6, 2), ())),
    Layout("uneven", (7, 5), (("tensor", "data"), ("context",)), uneven=True),
    Layout("fewer rows than ranks", (2, 3), (("context",), ()), uneven=True),
    Layout("one stage", (12, 6), (("tensor",), ()), stages=(1,)),
    Layout("tied", (12, 6), (("tensor",), ()), stages=(0, 1)),
    Layout("scalar", ()),
    Layout("heads", (8, 6), (("context",), ()), heads=HeadSplit(2, 2)),
    Layout("fused heads", (16, 6), (("context",), ()), parts=((8, 8), ()), heads=HeadSplit(4)),
    Layout("shared by some", (4, 6), (("context",), ()), heads=HeadSplit(2, shared=True)),
    Layout("shared by all", (6, 4), ((), ("context",)), heads=HeadSplit(1, shared=True)),
    Layout("shared, tied", (4,), (("context",),), stages=(0, 1), heads=HeadSplit(1, shared=True)),
    Layout("dealt", (7, 2), (("context",), ()), ranges=(((4, 7),), ((0, 1), (2, 4)), ((1, 2),))),
    Layout("dealt twice", (4,), (("tensor",),), ranges=(((0, 2), (0, 2)), ((0, 2), (2, 4)))),
]
PADDED = Layout("padded", (4,), (("context",),), ranges=(((0, 4),), ((4, 8),), ((4, 8),)))


@pytest.mark.parametrize("layout", [*LAYOUTS, PADDED], ids=lambda layout: layout.name)
def test_owned_shards_tile_the_tensor_once(layout: Layout):
    covered = [
        cell
        for rank in range(MESH.size)
        if owns(layout, MESH, rank)
        for where, _ in blocks(layout, MESH, rank, once=True)
        for cell in itertools.product(*(range(s.start, s.stop) for s in where))
    ]
    assert sorted(covered) == list(itertools.product(*(range(n) for n in layout.shape)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_blocks_fill_the_local_shard_once(layout: Layout):
    for rank in range(MESH.size):
        filled = [
            cell
            for _, local in blocks(layout, MESH, rank)
            for cell in itertools.product(*(range(s.start, s.stop) for s in local))
        ]
        shape = local_shape(layout, MESH, rank)
        assert sorted(filled) == list(itertools.product(*(range(n) for n in shape)))


def test_a_fused_dim_is_cut_part_by_part():
    layout = Layout("qkv", (12, 6), (("tensor",), ()), parts=((4, 4, 4), ()))
    mesh = Mesh((("tensor", 2),))
    assert local_slices(layout, mesh, 1)[0] == (slice(2, 4), slice(6, 8), slice(10, 12))


@given(st.integers(0, 40), st.integers(1, 9))
def test_uneven_cuts_differ_by_one_at_most(extent: int, size: int):
    mesh = Mesh((("tensor", size),))
    layout = Layout("w", (extent,), (("tensor",),), uneven=True)
    lengths = [local_shape(layout, mesh, rank)[0] for rank in range(size)]
    assert sum(lengths) == extent
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@pytest.mark.parametrize(
    ("layout", "axes", "replicas"),
    [
        (Layout("w", (4,)), ("data", "context"), 6),
        (Layout("w", (4,), (("tensor",),)), ("data", "context"), 6),
        (Layout("norm", (4,), unreduced=("tensor",)), ("data", "context", "tensor"), 6),
        (Layout("zero", (4,), (("data",),)), ("context",), 3),
    ],
)
def test_gradients_are_summed_where_tokens_differ_and_where_partial(layout, axes, replicas):
    assert gradient_axes(layout, MESH) == axes
    assert num_replicas(layout, MESH) == replicas


def test_ranks_with_the_same_heads_sum_and_hold_them_together():
    mesh = Mesh((("data", 2), ("tensor", 4)))
    q = Layout("q", (12,), (("tensor",),), heads=HeadSplit(2, 3))
    kv = Layout("kv", (4,), (("tensor",),), heads=HeadSplit(2, shared=True))
    assert [local_slices(q, mesh, r)[0] for r in range(4)] == [
        (slice(0, 4),),
        (slice(4, 6),),
        (slice(6, 10),),
        (slice(10, 12),),
    ]
    assert [local_slices(kv, mesh, r)[0] for r in (1, 2)] == [(slice(0, 2),), (slice(2, 4),)]
    assert gradient_ranks(kv, mesh, 6) == replica_ranks(kv, mesh, 6) == (2, 3, 6, 7)
    assert (owner(kv, mesh, 7), owner(q, mesh, 7)) == (2, 3)
    assert num_replicas(kv, mesh) == 2


def test_placements_are_the_dims_that_each_axis_shards():
    layout = Layout("w", (12, 6), (("data", "tensor"), ("context",)))
    assert placements(layout, MESH.names) == (0, None, 1, 0)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Layout("w", (4, 4), (("tensor",),)), "has 2 dims, but split names 1"),
        (lambda: Layout("w", (4, 4), (("data",), ("data",))), "uses an axis twice"),
        (
            lambda: Layout("w", (5,), (("tensor",),), heads=HeadSplit(2)),
            r"parts \(5,\) of dim 0 cannot hold 2 heads",
        ),
        (
            lambda: Layout("w", (4,), (("data", "tensor"),), heads=HeadSplit(2)),
            r"heads are cut over the axes",
        ),
        (lambda: Layout("w", (4,), parts=((1, 2),)), r"parts \(1, 2\) sum to 3"),
        (
            lambda: local_slices(Layout("w", (5,), (("tensor",),)), MESH, 0),
            r"w: dim 0 has 5 elements, which 2 ranks \(tensor\) .* multiple of 2",
        ),
        (
            lambda: local_slices(Layout("w", (6,), (("tensor",),), parts=((3, 3),)), MESH, 0),
            "dim 0 has 3 elements",
        ),
        (
            lambda: Layout("w", (4,), (("tensor",),), ranges=(((0, 3),), ((2, 4),))),
            "leave some out or overlap",
        ),
        (
            lambda: local_slices(Layout("w", (1,), (("tensor",),), ranges=(((0, 1),),)), MESH, 0),
            "dealt to 1 ranks, but tensor has 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, text):
    with pytest.raises(LayoutError, match=text):
        make()
