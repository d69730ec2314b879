"""Every tensor-parallel layer equals plain torch on one process: output and all gradients.

In float64, features, heads and groups of heads that divide and that do not. Parameters start as
random numbers everywhere, biases and norms too, so that one counted twice, or never, shows. Worlds
in which tensor groups do not start at rank 0 or are not neighbours are among them.
"""

import copy
import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.each import each
from tests.tells import facts_pattern
from torchdistpackage.comm.collectives import all_gather
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import blocks
from torchdistpackage.layout.mark import collect
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.parallel.tensor import chunked
from torchdistpackage.parallel.tensor.attention import ParallelAttention, rotary_tables, rotate
from torchdistpackage.parallel.tensor.full import FullTensors
from torchdistpackage.parallel.tensor.init import Initial, initialize
from torchdistpackage.parallel.tensor.linear import ColumnLinear, ParallelMlp, RowLinear
from torchdistpackage.parallel.tensor.norm import LayerNorm, RMSNorm
from torchdistpackage.topology.mesh import Mesh

S, B, DIM, HIDDEN, HEADS = 12, 2, 24, 36, 12
UNEVEN = 37
RANDOM = Initial("normal", 0.5)
WORLDS = [
    (("tensor", 2),),
    (("tensor", 4),),
    (("data", 2), ("tensor", 2)),
    (("tensor", 1),),
    (("tensor", 3),),
    (("tensor", 2), ("data", 2)),
]

TABLES = rotary_tables(S, DIM // HEADS, dtype=torch.float64)


class Rotary(nn.Module):
    """Attention that is given tables, in the form in which the other layers are called."""

    def __init__(self, kv_heads=None, **common):
        super().__init__()
        self.inner = ParallelAttention(DIM, HEADS, kv_heads=kv_heads, causal=True, **common)

    def forward(self, x: Tensor, sizes=None) -> Tensor:
        return self.inner(x, TABLES, sizes)


def linears(hidden=HIDDEN, **common) -> nn.Module:
    return nn.Sequential(
        ColumnLinear(DIM, hidden, **common), nn.GELU(), RowLinear(hidden, DIM, **common)
    )


def gated(hidden: int, **common) -> nn.Module:
    return ParallelMlp(DIM, hidden, gated=True, activation=F.silu, bias=False, **common)


def fused(**common) -> nn.Module:
    """Gate and up side by side, cut piece by piece, then multiplied channel by channel."""
    up = ColumnLinear(DIM, 2 * HIDDEN, bias=False, parts=(HIDDEN, HIDDEN), **common)
    return nn.Sequential(up, nn.GLU(), RowLinear(HIDDEN, DIM, bias=False, **common))


def norm(kind, group, **common) -> nn.Module:
    return kind(DIM, **common)


TWO = "causal, rotary, 2 groups"
"""Which 3 ranks cannot share alike."""

LAYERS = {
    "column, row": linears,
    "column, row, uneven": partial(linears, UNEVEN),
    "fused columns": fused,
    "mlp": lambda **common: ParallelMlp(DIM, HIDDEN, **common),
    "mlp, gated": partial(gated, HIDDEN),
    "mlp, gated, uneven": partial(gated, UNEVEN),
    "attention": lambda **common: ParallelAttention(DIM, HEADS, **common),
    "attention, wide, uneven": lambda **common: ParallelAttention(
        DIM, 5, head_dim=6, out_bias=False, **common
    ),
    "causal, rotary": Rotary,
    "causal, rotary, 4 groups": partial(Rotary, 4),
    TWO: partial(Rotary, 2),
    "causal, rotary, 1 group": partial(Rotary, 1),
    "layer norm": lambda **common: norm(LayerNorm, **common),
    "rms norm": lambda **common: norm(RMSNorm, **common),
}


def plain_attention(
    w: dict[str, Tensor], x: Tensor, causal: bool, groups: int | None = None, num: int = HEADS
) -> Tensor:
    """Head by head, with the softmax written out."""
    w = {name.removeprefix("inner."): value for name, value in w.items()}
    if groups is None:
        q, k, v = F.linear(x, w["qkv.weight"], w["qkv.bias"]).chunk(3, -1)
    else:
        q = F.linear(x, w["q.weight"], w["q.bias"])
        k, v = F.linear(x, w["kv.weight"], w["kv.bias"]).chunk(2, -1)
    heads = []
    for i, a in enumerate(q.chunk(num, -1)):
        at = i if groups is None else i * groups // num
        b, c = (t.chunk(groups or num, -1)[at].transpose(0, 1) for t in (k, v))
        a = a.transpose(0, 1)
        if causal:
            a, b = rotate(a, TABLES), rotate(b, TABLES)
        scores = a @ b.transpose(1, 2) / a.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
        heads.append((scores.softmax(-1) @ c).transpose(0, 1))
    return F.linear(torch.cat(heads, -1), w["out.weight"], w.get("out.bias"))


def plain_linears(w: dict[str, Tensor], x: Tensor) -> Tensor:
    hidden = F.gelu(F.linear(x, w["0.weight"], w["0.bias"]))
    return F.linear(hidden, w["2.weight"], w["2.bias"])


def plain_gated(w: dict[str, Tensor], x: Tensor) -> Tensor:
    gate, up = F.linear(x, w["gate_up.weight"]).chunk(2, -1)
    return F.linear(F.silu(gate) * up, w["down.weight"])


PLAIN = {
    "column, row": plain_linears,
    "column, row, uneven": plain_linears,
    "fused columns": lambda w, x: F.linear(F.glu(F.linear(x, w["0.weight"])), w["2.weight"]),
    "mlp": lambda w, x: F.linear(
        F.gelu(F.linear(x, w["up.weight"], w["up.bias"])), w["down.weight"], w["down.bias"]
    ),
    "mlp, gated": plain_gated,
    "mlp, gated, uneven": plain_gated,
    "attention": lambda w, x: plain_attention(w, x, causal=False),
    "attention, wide, uneven": lambda w, x: plain_attention(w, x, causal=False, num=5),
    "causal, rotary": lambda w, x: plain_attention(w, x, causal=True),
    "causal, rotary, 4 groups": lambda w, x: plain_attention(w, x, True, 4),
    TWO: lambda w, x: plain_attention(w, x, True, 2),
    "causal, rotary, 1 group": lambda w, x: plain_attention(w, x, True, 1),
    "layer norm": lambda w, x: F.layer_norm(x, (DIM,), w["weight"], w["bias"]),
    "rms norm": lambda w, x: F.rms_norm(x, (DIM,), w["weight"], 1e-5),
}


def check_whole(layer: nn.Module, weights: dict[str, Tensor]) -> None:
    """What the ranks hold is what one process holds; there and back, and counted once."""
    for part, prefix in ((part, f"{path}." * bool(path)) for path, part in layer.named_modules()):
        if isinstance(part, FullTensors) and not prefix.count("."):
            full = part.to_full()
            assert full and all(torch.equal(x, weights[prefix + key]) for key, x in full.items())
            part.from_full({key: 2 * x for key, x in full.items()})
            assert all(torch.equal(x, 2 * full[key]) for key, x in part.to_full().items())
            part.from_full(full)
    norm = clip_grad_norm_(layer.parameters(), torch.inf, group=tpc.get_group("tensor"))
    grads = [weight.grad for weight in weights.values()]
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(grads), rtol=1e-11, atol=0)


def build(name: str, group, mode: str) -> nn.Module:
    how = {"group": group, "sequence_parallel": mode != "", "dtype": torch.float64}
    if "overlap" in mode:
        how["tp_comm_overlap"] = True
    return LAYERS[name](**how)


def whole_weights(name: str) -> dict[str, Tensor]:
    """All parameters of the layer as one process has them."""
    layer = build(name, tpc.groups.of([tpc.rank]), "")
    layouts = collect(layer)
    initialize(layer, layouts, Mesh(()), 0, 7, dict.fromkeys(layouts, RANDOM))
    return {key: p.detach().requires_grad_() for key, p in layer.named_parameters()}


def lengths(group, mode: str) -> tuple[int, ...]:
    """Of each rank's run of the sequence; of uneven ones the second rank has none."""
    size = group.size()
    if mode == "":
        return (S,) * size
    if "uneven" not in mode or size == 1:
        return (S // size,) * size
    return (S - 2 * (size - 2) - 1, 0, *(2,) * (size - 3), 3) if size > 2 else (5, S - 5)


def check_layer(world, name: str, mode: str, recompute: bool | None) -> None:
    """mode: "", or words: sequence, uneven, overlap."""
    with pytest.MonkeyPatch.context() as patch:
        for least in ("CHUNK_BYTES", "QUEUED_CHUNK_BYTES"):  # so that little is cut too
            patch.setattr(chunked, least, 1)
        _check_layer(world, name, mode, recompute)


def _check_layer(world, name: str, mode: str, recompute: bool | None) -> None:
    tpc.setup_process_groups(list(world))
    mesh, group = tpc.topology.dense, tpc.get_group("tensor")
    layer = build(name, group, mode)
    layouts = collect(layer)
    initialize(layer, layouts, mesh, tpc.rank, 7, dict.fromkeys(layouts, RANDOM))

    draw = torch.Generator().manual_seed(1)
    x, weight_of_y = torch.randn(2, S, B, DIM, dtype=torch.float64, generator=draw)
    weights = whole_weights(name)
    x.requires_grad_()
    y = PLAIN[name](weights, x)
    (y * weight_of_y).sum().backward()

    sizes = lengths(group, mode)
    start = 0 if mode == "" else sum(sizes[: group.rank()])
    mine = slice(start, start + sizes[group.rank()])
    x_mine = x[mine].detach().requires_grad_()
    given = {"sizes": sizes} if "uneven" in mode else {}
    if recompute is None:
        y_mine = layer(x_mine, **given)
    else:
        y_mine = checkpoint(layer, x_mine, use_reentrant=recompute)
    (y_mine * weight_of_y[mine]).sum().backward()

    close = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(y_mine, y[mine], **close)
    torch.testing.assert_close(x_mine.grad, x.grad[mine], **close)
    check_whole(layer, weights)
    for key, parameter in layer.named_parameters():
        for at, local in blocks(layouts[key], mesh, tpc.rank):
            torch.testing.assert_close(parameter.grad[local], weights[key].grad[at], **close)
            assert torch.equal(parameter[local], weights[key][at]), f"{key} starts differently"


def modes_of(name: str) -> tuple[str, ...]:
    if "norm" in name:
        return ("", "sequence")
    if "column" in name:
        return ("", "sequence", "overlap")
    return ("", "sequence", "uneven", "overlap", "overlap, uneven")


TELLING = {
    "column, row": ("overlap",),
    "column, row, uneven": ("",),
    "fused columns": ("sequence",),
    "mlp": ("uneven",),
    "mlp, gated": ("sequence",),
    "mlp, gated, uneven": ("overlap, uneven",),
    "attention": ("",),
    "attention, wide, uneven": ("overlap, uneven",),
    TWO: ("uneven",),
    "causal, rotary": ("overlap",),
    "causal, rotary, 4 groups": ("uneven",),
    "causal, rotary, 1 group": ("sequence", "overlap"),
    "layer norm": ("sequence",),
    "rms norm": ("sequence",),
}
"""Modes of layers, each of both at least once, in which they differ most from plain ones."""
assert TELLING.keys() == LAYERS.keys()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "modes"),
    [
        pytest.param(WORLDS[0], TELLING, id="telling"),
        *((world, {name: modes_of(name) for name in LAYERS}) for world in WORLDS),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "all",
)
def test_a_layer_equals_plain_torch(ranks, world, modes):
    """With and without sequence parallelism, runs of all lengths, and chunks that overlap."""
    names = [name for name in modes if ("tensor", 3) not in world or name != TWO]
    cases = [(world, name, mode, None) for name in names for mode in modes[name]]
    ranks(Mesh(world).size).run(each, check_layer, cases)


def test_recomputation_gives_the_same_gradients(ranks):
    cases = itertools.product(
        [WORLDS[0]], ["causal, rotary"], ("", "sequence", "overlap"), (False, True)
    )
    ranks(2).run(each, check_layer, list(cases))


def refuse_what_does_not_divide() -> None:
    with pytest.raises(LayoutError, match=r"12 heads in 3 groups.* use 3 tensor ranks$"):
        ParallelAttention(24, 12, kv_heads=3)
    with pytest.raises(LayoutError, match=r"3 heads, which 4 tensor ranks .* 3 tensor ranks, or 4"):
        ParallelAttention(24, 3)
    both = r"(?s)2 problems.*dim 24 cannot be cut into 7 heads.*6 or 8 heads, or dim 21 or 28"
    with pytest.raises(LayoutError, match=both + r".*7 query heads cannot share 2 .* 1 or 7 key"):
        ParallelAttention(24, 7, kv_heads=2)
    with pytest.raises(
        LayoutError, match=r"dim 0 has 3 elements, which 4 ranks .* use 4, or 3 tensor"
    ):
        ColumnLinear(3, 3)
    with pytest.raises(LayoutError, match=r"(?s)2 problems.* has 2 elements.* has 3 elements"):
        ColumnLinear(3, 5, parts=(2, 3))
    with pytest.raises(LayoutError, match=facts_pattern("dim 1", "3 elements", "4 ranks")):
        RowLinear(3, 3)
    with pytest.raises(LayoutError, match=facts_pattern("2 elements", "4 ranks")):
        ParallelMlp(3, 2)
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
