"""`parallelize`: a model of plain layers, split by a table, computes what it did in one process."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.layout.derive import blocks
from torchdistpackage.layout.layout import HeadSplit, Layout
from torchdistpackage.layout.table import AttentionCut, LayerCut, SplitTable
from torchdistpackage.parallel.tensor.linear import ColumnLinear, RowLinear
from torchdistpackage.parallel.tensor.parallelize import parallelize
from torchdistpackage.topology.mesh import Mesh

VOCAB, DIM, HEADS, WIDTH, HIDDEN, SEQ_LEN = 7, 6, 3, 2, 5, 4
SIZE = 2


class Scaled(nn.Embedding):
    """As Gemma's: more than a look-up."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        for name in ("q", "k"):
            self.add_module(name, nn.Linear(DIM, HEADS * WIDTH))
        self.out = nn.Linear(HEADS * WIDTH, DIM)

    def forward(self, hidden_states: Tensor, by_head: Tensor) -> Tensor:
        batch, length, _ = hidden_states.shape
        shape = (batch, length, self.num_heads, WIDTH)
        q, k = (x(hidden_states).view(shape).transpose(1, 2) for x in (self.q, self.k))
        scores = q @ k.transpose(2, 3) + by_head.view(batch, self.num_heads, 1, 1)
        mixed = scores.softmax(-1) @ k
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class Turned(nn.Module):
    """Its weight is (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Scaled(VOCAB, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.attention = Attention()
        self.up, self.down = Turned(DIM, HIDDEN), Turned(HIDDEN, DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.enter: Callable[[Tensor], Tensor] = lambda x: x
        self.leave: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, ids: Tensor) -> Tensor:
        x = self.enter(self.embed(ids))
        by_head = torch.linspace(0, 1, len(ids) * HEADS, dtype=x.dtype).view(-1, 1)
        x = x + self.attention(hidden_states=self.norm(x), by_head=by_head)
        return self.head(self.leave(x + self.down(self.up(x).tanh())))


def table(sequence_parallel: bool) -> SplitTable:
    heads = HeadSplit(HEADS)

    def weight(*shape: int, dim: int, heads: HeadSplit | None = None) -> Layout:
        split = tuple(("tensor",) if at == dim else () for at in range(2))
        return Layout("", shape, split, heads=heads, uneven=True)

    how = {"sequence_parallel": sequence_parallel}
    columns = {
        f"attention.{name}": LayerCut(
            "column", weight(DIM, DIM, dim=0, heads=heads), entrance="attention", **how
        )
        for name in ("q", "k")
    }
    layers = {
        "embed": LayerCut("vocab", weight(VOCAB, DIM, dim=0)),
        **columns,
        "attention.out": LayerCut("row", weight(DIM, DIM, dim=1, heads=heads), **how),
        "up": LayerCut("column", weight(DIM, HIDDEN, dim=1), True, "up", **how),
        "down": LayerCut("row", weight(HIDDEN, DIM, dim=0), True, **how),
        "head": LayerCut("column", weight(VOCAB, DIM, dim=0), entrance="head"),
        "elsewhere": LayerCut("row", weight(DIM, DIM, dim=1)),
    }
    attention = AttentionCut(heads, heads, WIDTH, {"num_heads": "heads"}, ("by_head",))
    partial = {}
    if sequence_parallel:
        names = ("norm.weight", "norm.bias", "attention.out.bias", "down.bias")
        partial = {x: Layout(x, (DIM,), unreduced=("tensor",)) for x in names}
    return SplitTable(layers, {"attention": attention}, partial)


def compare(sequence_parallel: bool) -> None:
    tpc.setup_process_groups([("tensor", SIZE)])
    group, mesh = tpc.get_group("tensor"), Mesh((("tensor", SIZE),))
    torch.manual_seed(2)
    whole = Model().double()
    split, cuts = deepcopy(whole), table(sequence_parallel)
    parallelize(split, cuts, group)
    assert isinstance(split.up, ColumnLinear) and isinstance(split.attention.out, RowLinear)
    assert split.attention.num_heads == (2, 1)[group.rank()]
    assert split.head.weight is split.embed.weight
    assert [*dict(split.named_parameters())] == [*dict(whole.named_parameters())]
    if sequence_parallel:
        split.enter = lambda x: collectives.scatter(x, 1, group)
        split.leave = lambda x: collectives.gather(x, 1, group)
    ids = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) % VOCAB
    truth, mine = whole(ids), split(ids)
    columns = slice(0, 4) if group.rank() == 0 else slice(4, VOCAB)
    torch.testing.assert_close(mine, truth[..., columns], rtol=1e-12, atol=1e-12)
    by = torch.linspace(-1, 2, truth.numel(), dtype=torch.float64).view(truth.shape)
    (truth * by).sum().backward()
    (mine * by[..., columns]).sum().backward()
    of_one = dict(whole.named_parameters())
    for name, parameter in split.named_parameters():
        grad, expected = parameter.grad, of_one[name].grad
        path, _, kind = name.rpartition(".")
        if name.startswith("norm") and sequence_parallel:  # row layers sum those of their biases
            grad = collectives.reduce(grad, group)
        if (cut := cuts.layers.get(path)) is not None and kind == "weight":
            ((where, here),) = blocks(cut.weight, mesh, group.rank())
            grad, expected = grad[here], expected[where]
        elif cut is not None and cut.kind == "column":
            ((where, _),) = blocks(split.get_submodule(path).layouts()["bias"], mesh, group.rank())
            expected = expected[where]
        torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_split_model_computes_what_it_did(ranks, sequence_parallel):
    """Uneven heads, a tied head, an MLP of odd width stored the other way, inputs by head."""
    ranks(SIZE).run(compare, sequence_parallel)
