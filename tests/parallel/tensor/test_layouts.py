"""What layers say of their cuts, without torch: sizes, partial gradients, names."""

import pytest

from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import local_shape, local_slices
from torchdistpackage.parallel.tensor import layouts as cut
from torchdistpackage.topology.mesh import Mesh

MESH = Mesh((("tensor", 2),))


def test_attention_keeps_heads_together():
    layouts = cut.attention(8, False, "tensor", False)
    assert list(layouts) == ["qkv.weight", "out.weight"]
    rows, columns = local_slices(layouts["qkv.weight"], MESH, 1)
    assert rows == (slice(4, 8), slice(12, 16), slice(20, 24))
    assert columns == (slice(0, 8),)
    assert local_shape(layouts["out.weight"], MESH, 1) == (8, 4)


def test_a_column_and_the_row_behind_it_cut_the_same_dim():
    layouts = cut.mlp(6, 10, True, "tensor", False)
    up, down = (local_slices(layouts[f"{name}.weight"], MESH, 1) for name in ("up", "down"))
    assert up[0] == down[1] == (slice(5, 10),)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_are_partial_where_a_rank_sees_only_its_rows(sequence_parallel):
    partial = {
        name
        for layouts in (
            cut.prefixed("attention", cut.attention(8, True, "tensor", sequence_parallel)),
            cut.prefixed("mlp", cut.mlp(8, 8, True, "tensor", sequence_parallel)),
            cut.prefixed("norm", cut.norm(8, True, "tensor", sequence_parallel)),
            cut.position(4, 8, "tensor", sequence_parallel),
            cut.vocab_embedding(9, 8, "tensor"),
        )
        for name, layout in layouts.items()
        if layout.unreduced == ("tensor",)
    }
    whole = {"attention.out.bias", "mlp.down.bias", "norm.weight", "norm.bias", "position"}
    assert partial == (whole if sequence_parallel else set())


def test_parts_of_an_uneven_vocabulary_differ_by_one_at_most():
    (layout,) = cut.vocab_embedding(5, 3, "tensor").values()
    mesh = Mesh((("tensor", 4),))
    assert [local_shape(layout, mesh, rank)[0] for rank in range(4)] == [2, 1, 1, 1]


def test_transposed_swaps_dims_cuts_and_parts():
    layout = cut.transposed(cut.column(6, 4, True, "tensor", (4, 2)))["weight"]
    assert (layout.shape, layout.split, layout.parts) == ((4, 6), ((), ("tensor",)), ((), (4, 2)))


def test_prefixed_renames_key_and_layout():
    layouts = cut.prefixed("a.b", cut.norm(3, False, "tensor", False))
    assert {name: layout.name for name, layout in layouts.items()} == {"a.b.weight": "a.b.weight"}


@pytest.mark.parametrize(
    ("dim", "heads", "size", "text"),
    [
        (10, 4, 1, r"here: dim 10 cannot be cut into 4 heads"),
        (12, 3, 2, r"here: 3 heads, which 2 tensor ranks cannot share.* multiple of 2"),
        (12, 0, 1, r"into 0 heads"),
    ],
)
def test_heads_that_do_not_divide(dim, heads, size, text):
    with pytest.raises(LayoutError, match=text):
        cut.heads_per_rank(dim, heads, size, "here")
    assert cut.heads_per_rank(12, 6, 3) == 2
