"""Every tensor-parallel layer equals plain torch on one process: output and all gradients.

In float64. Parameters start as random numbers everywhere, biases and norms too, so that one
counted twice, or never, shows. Worlds in which tensor groups do not start at rank 0 or
are not neighbours are among them.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchdistpackage.comm.collectives import all_gather
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import blocks
from torchdistpackage.parallel.tensor.attention import ParallelAttention
from torchdistpackage.parallel.tensor.collect import collect
from torchdistpackage.parallel.tensor.init import Initial, initialize
from torchdistpackage.parallel.tensor.linear import ColumnLinear, RowLinear
from torchdistpackage.parallel.tensor.mlp import ParallelMlp
from torchdistpackage.parallel.tensor.norm import LayerNorm, RMSNorm
from torchdistpackage.parallel.tensor.rotary import rotary_tables, rotate
from torchdistpackage.topology.mesh import Mesh

S, B, DIM, HIDDEN, HEADS = 12, 2, 24, 36, 12
RANDOM = Initial("normal", 0.5)
WORLDS = [
    (("tensor", 1),),
    (("tensor", 2),),
    (("tensor", 3),),
    (("data", 2), ("tensor", 2)),
    (("tensor", 2), ("data", 2)),
    (("tensor", 4),),
]

TABLES = rotary_tables(S, DIM // HEADS, dtype=torch.float64)


class Rotary(nn.Module):
    """Attention that is given tables, in the form in which the other layers are called."""

    def __init__(self, **common):
        super().__init__()
        self.inner = ParallelAttention(DIM, HEADS, causal=True, **common)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, TABLES)


def linears(**common) -> nn.Module:
    return nn.Sequential(
        ColumnLinear(DIM, HIDDEN, **common), nn.GELU(), RowLinear(HIDDEN, DIM, **common)
    )


def fused(**common) -> nn.Module:
    """Gate and up side by side, cut piece by piece, then multiplied channel by channel."""
    up = ColumnLinear(DIM, 2 * HIDDEN, bias=False, parts=(HIDDEN, HIDDEN), **common)
    return nn.Sequential(up, nn.GLU(), RowLinear(HIDDEN, DIM, bias=False, **common))


def norm(kind, group, **common) -> nn.Module:
    return kind(DIM, **common)


LAYERS = {
    "column, row": linears,
    "fused columns": fused,
    "mlp": lambda **common: ParallelMlp(DIM, HIDDEN, **common),
    "attention": lambda **common: ParallelAttention(DIM, HEADS, **common),
    "causal, rotary": Rotary,
    "layer norm": lambda **common: norm(LayerNorm, **common),
    "rms norm": lambda **common: norm(RMSNorm, **common),
}


def plain_attention(w: dict[str, Tensor], x: Tensor, causal: bool) -> Tensor:
    """Head by head, with the softmax written out."""
    prefix = "inner." if causal else ""
    q, k, v = F.linear(x, w[f"{prefix}qkv.weight"], w[f"{prefix}qkv.bias"]).chunk(3, -1)
    heads = []
    for mine in torch.arange(DIM).chunk(HEADS):
        a, b, c = (t[..., mine].transpose(0, 1) for t in (q, k, v))
        if causal:
            a, b = rotate(a, TABLES), rotate(b, TABLES)
        scores = a @ b.transpose(1, 2) / len(mine) ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
        heads.append((scores.softmax(-1) @ c).transpose(0, 1))
    return F.linear(torch.cat(heads, -1), w[f"{prefix}out.weight"], w[f"{prefix}out.bias"])


PLAIN = {
    "column, row": lambda w, x: F.linear(
        F.gelu(F.linear(x, w["0.weight"], w["0.bias"])), w["2.weight"], w["2.bias"]
    ),
    "fused columns": lambda w, x: F.linear(F.glu(F.linear(x, w["0.weight"])), w["2.weight"]),
    "mlp": lambda w, x: F.linear(
        F.gelu(F.linear(x, w["up.weight"], w["up.bias"])), w["down.weight"], w["down.bias"]
    ),
    "attention": lambda w, x: plain_attention(w, x, causal=False),
    "causal, rotary": lambda w, x: plain_attention(w, x, causal=True),
    "layer norm": lambda w, x: F.layer_norm(x, (DIM,), w["weight"], w["bias"]),
    "rms norm": lambda w, x: F.rms_norm(x, (DIM,), w["weight"], 1e-5),
}


def build(name: str, group, sequence_parallel: bool) -> nn.Module:
    return LAYERS[name](group=group, sequence_parallel=sequence_parallel, dtype=torch.float64)


def whole_weights(name: str) -> dict[str, Tensor]:
    """All parameters of the layer as one process has them."""
    layer = build(name, tpc.groups.of([tpc.rank]), False)
    layouts = collect(layer)
    initialize(layer, layouts, Mesh(()), 0, 7, dict.fromkeys(layouts, RANDOM))
    return {key: p.detach().requires_grad_() for key, p in layer.named_parameters()}


def check_layer(world, name: str, sequence_parallel: bool, recompute: bool | None) -> None:
    tpc.setup_process_groups(list(world))
    mesh, group = tpc.topology.dense, tpc.get_group("tensor")
    layer = build(name, group, sequence_parallel)
    layouts = collect(layer)
    initialize(layer, layouts, mesh, tpc.rank, 7, dict.fromkeys(layouts, RANDOM))

    draw = torch.Generator().manual_seed(1)
    x, weight_of_y = torch.randn(2, S, B, DIM, dtype=torch.float64, generator=draw)
    weights = whole_weights(name)
    x.requires_grad_()
    y = PLAIN[name](weights, x)
    (y * weight_of_y).sum().backward()

    cuts = group.size() if sequence_parallel else 1
    mine = slice(0, S) if cuts == 1 else slice(*(S // cuts * (group.rank() + i) for i in (0, 1)))
    x_mine = x[mine].detach().requires_grad_()
    if recompute is None:
        y_mine = layer(x_mine)
    else:
        y_mine = checkpoint(layer, x_mine, use_reentrant=recompute)
    (y_mine * weight_of_y[mine]).sum().backward()

    close = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(y_mine, y[mine], **close)
    torch.testing.assert_close(x_mine.grad, x.grad[mine], **close)
    for key, parameter in layer.named_parameters():
        for at, local in blocks(layouts[key], mesh, tpc.rank):
            torch.testing.assert_close(parameter.grad[local], weights[key].grad[at], **close)
            assert torch.equal(parameter[local], weights[key][at]), f"{key} starts differently"


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_plain_torch(ranks, world, name, sequence_parallel):
    size = Mesh(world).size
    ranks(size).run(check_layer, world, name, sequence_parallel, None)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence"])
def test_recomputation_gives_the_same_gradients(ranks, sequence_parallel, reentrant):
    ranks(2).run(check_layer, WORLDS[1], "causal, rotary", sequence_parallel, reentrant)


def refuse_what_does_not_divide() -> None:
    with pytest.raises(LayoutError, match=r"6 heads, which 4 tensor ranks cannot share"):
        ParallelAttention(24, 6)
    with pytest.raises(LayoutError, match=r"dim 24 cannot be cut into 7 heads"):
        ParallelAttention(24, 7)
    with pytest.raises(LayoutError, match=r"weight: dim 0 has 6 elements, which 4 ranks"):
        ColumnLinear(3, 6)
    with pytest.raises(LayoutError, match=r"weight: dim 1 has 6 elements, which 4 ranks"):
        RowLinear(6, 3)
    layer = RowLinear(8, 3, sequence_parallel=True)
    with pytest.raises(LayoutError, match=r"dim 0 .* has 6 elements, which 4 ranks"):
        layer(torch.ones(6, 1, 2))


def test_what_does_not_divide_is_refused_with_the_numbers(ranks):
    ranks(4).run(refuse_what_does_not_divide)


def deep_copies_share_the_group() -> None:
    tpc.setup_process_groups([("tensor", 2)])
    layer = nn.Sequential(ParallelMlp(4, 8), ParallelAttention(4, 2, dropout=0.1).eval())
    twin = copy.deepcopy(layer)
    assert twin[0].up.group is layer[0].up.group
    assert twin[0].up.weight is not layer[0].up.weight
    x = torch.ones(2, 1, 4)
    assert torch.equal(twin(x), layer(x))


def test_a_deep_copy_talks_over_the_same_group(ranks):
    ranks(2).run(deep_copies_share_the_group)


def groups_are_held_from_construction() -> None:
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    layer = ColumnLinear(2, 4, sequence_parallel=True)
    held = tpc.get_group("tensor")
    x = torch.full((1, 1, 2), float(tpc.rank))
    with tpc.using(tpc.topology, 0):  # stands in for a tpc that has moved on: it has no groups
        y = layer(x)
    assert layer.group is held
    torch.testing.assert_close(y, F.linear(all_gather(x, 0, held), layer.weight, layer.bias))


def test_a_layer_never_asks_tpc_again(ranks):
    ranks(4).run(groups_are_held_from_construction)
