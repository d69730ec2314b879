"""What other modules compute with the weight of a split layer equals one process."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import mark_parameter
from torchdistpackage.parallel.tensor.embedding import (
    FeatureParallelEmbedding,
    VocabParallelEmbedding,
)
from torchdistpackage.parallel.tensor.linear import ColumnLinear, RowLinear
from torchdistpackage.parallel.tensor.lookup import split_lookup
from torchdistpackage.parallel.tensor.weight_reads import _places


def close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


class Ours:
    """How plain layers become split ones; a subclass splits them as another library does."""

    def set_up(self) -> None:
        tpc.setup_process_groups([("tensor", 2)])

    def column(self, layer: nn.Linear) -> nn.Module:
        return ColumnLinear(layer.in_features, layer.out_features).from_full(layer)

    def row(self, layer: nn.Linear) -> nn.Module:
        return RowLinear(layer.in_features, layer.out_features).from_full(layer)

    def attention_out(self, layer: nn.Linear) -> nn.Module:
        return self.row(layer)

    def each(self, table: nn.Embedding, linear: nn.Linear) -> list[Any]:
        """Both, split each way."""
        split: list[Any] = [VocabParallelEmbedding(10, 6), FeatureParallelEmbedding(10, 6)]
        return [*split, ColumnLinear(6, 8), RowLinear(6, 8)]


def column_and_row(layer: nn.Module, kind: Ours) -> None:
    layer.linear1, layer.linear2 = kind.column(layer.linear1), kind.row(layer.linear2)


MODES = {
    "train": nullcontext,
    "eval": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def encoders(kind: Ours) -> None:
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)
    split = deepcopy(plain)
    for layer in split.layers:
        column_and_row(layer, kind)
    x, padding = torch.randn(3, 5, 8), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    for mode, context in MODES.items():
        for how in ({}, {"src_key_padding_mask": padding}, {"mask": causal}):
            plain.train(mode == "train"), split.train(mode == "train")
            with context():
                close(split(x, **how)[~padding], plain(x, **how)[~padding])


def attentions(kind: Ours) -> None:
    plain = nn.MultiheadAttention(8, 2, batch_first=True)
    nn.init.normal_(plain.out_proj.weight)
    split, x = deepcopy(plain), torch.randn(3, 5, 8)
    split.out_proj = kind.attention_out(plain.out_proj)
    for context in (nullcontext, torch.no_grad):
        for training in (True, False):
            plain.train(training), split.train(training)
            with context():
                close(split(x, x, x)[0], plain(x, x, x)[0])


class Reader(nn.Module):
    """A module of the user's that knows of the split, and computes with its part."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self) -> Tensor:
        return self.layer.weight


def parts(kind: Ours) -> None:
    for each in kind.each(nn.Embedding(10, 6), nn.Linear(6, 8)):
        assert Reader(each)() is each._parameters["weight"]


class Tied(nn.Module):
    """A head that multiplies by the table, in a model that knows nothing of a split."""

    def __init__(self, table: nn.Module, again: bool = False):
        super().__init__()
        self.table, self.again = table, again

    def forward(self, ids: Tensor) -> Tensor:
        assert self.table.weight.dtype == torch.float64
        assert self.table.weight.shape == (10, 6) == tuple(self.table.weight.size())
        h = self.table(ids)
        if self.again:  # the backward computes it again
            return checkpoint(self.head, h, use_reentrant=False)
        return self.head(h)

    def head(self, h: Tensor) -> Tensor:
        return F.linear(h, self.table.weight)


def tables() -> None:
    plain, ids = nn.Embedding(10, 6), torch.tensor([[1, 2, 9, 2]])
    group = resolve_group(None, "tensor")
    for by_rows in (True, False):
        for again in (False, True):
            table = deepcopy(plain)
            part = table.weight.detach().chunk(2, 0 if by_rows else 1)[group.rank()]
            table = split_lookup(table, by_rows, 10 if by_rows else 6, group)
            table.weight = nn.Parameter(part.contiguous())
            layout = Layout("weight", (10, 6), (("tensor",), ()) if by_rows else ((), ("tensor",)))
            mark_parameter(table.weight, layout, group)
            plain.zero_grad()
            expected, ours = Tied(plain, again)(ids), Tied(table, again)(ids)
            close(ours, expected)
            expected.square().sum().backward(), ours.square().sum().backward()
            grad = table._parameters["weight"].grad
            close(grad, plain.weight.grad.chunk(2, 0 if by_rows else 1)[group.rank()])


def everything(kind: Ours) -> None:
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")  # of the plain encoder
    kind.set_up()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    assert resolve_group(None, "tensor").size() == 2
    encoders(kind)
    attentions(kind)
    parts(kind)


def ours() -> None:
    everything(Ours())
    tables()


def test_torch_reads_the_whole_weight_and_a_users_forward_its_part(ranks):
    ranks(2).run(ours)


def under_compile() -> None:
    warnings.filterwarnings("ignore", "Dynamo does not know how to trace the builtin `sys._get")
    tpc.setup_process_groups([("tensor", 2)])
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    plain = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval()
    split, x = deepcopy(plain), torch.randn(3, 5, 8)
    column_and_row(split, Ours())
    context: AbstractContextManager[None] = torch.no_grad()
    with context:
        close(torch.compile(split, backend="aot_eager")(x), plain(x))


@pytest.mark.full
@pytest.mark.own_transport("a graph calls torch's collectives of its own groups")
def test_a_graph_reads_it_whole_too(ranks):
    ranks(2).run(under_compile)


def test_slices_of_a_fused_weight_are_put_in_the_order_of_the_whole():
    fused = Layout("fused", (12, 6), (("tensor",), ()), parts=((4, 6, 2), ()))
    dim, lengths, index = _places(fused, 2)
    assert (dim, lengths) == (0, [6, 6]) and index is not None
    joined = [0, 1, 4, 5, 6, 10, *(2, 3, 7, 8, 9, 11)]  # half of each part, rank by rank
    assert [joined[at] for at in index.tolist()] == [*range(12)]
    plain = Layout("w", (4, 6), ((), ("tensor",)))
    assert _places(plain, 3) == (1, [2, 2, 2], None)
