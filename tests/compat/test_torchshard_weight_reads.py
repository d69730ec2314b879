"""What other modules compute with the weight of one of torchshard's layers equals one process."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchdistpackage.compat.torchshard as ts
from tests.parallel.tensor.test_weight_reads import Ours, close, column_and_row, everything
from torchdistpackage.errors import LayoutError


class Torchshard(Ours):
    def set_up(self) -> None:
        ts.distributed.init_process_group()

    def column(self, layer: nn.Linear) -> nn.Module:
        return ts.nn.ParallelLinear.convert_parallel_linear(layer, dim=1)

    def row(self, layer: nn.Linear) -> nn.Module:
        return ts.nn.ParallelLinear.convert_parallel_linear(layer, dim=0)

    def attention_out(self, layer: nn.Linear) -> nn.Module:
        return self.column(layer)

    def each(self, table: nn.Embedding, linear: nn.Linear) -> list[Any]:
        embedding, layer = ts.nn.ParallelEmbedding, ts.nn.ParallelLinear
        split = [embedding.convert_parallel_embedding(deepcopy(table), dim) for dim in (0, 1)]
        return [*split, *(layer.convert_parallel_linear(deepcopy(linear), dim) for dim in (0, 1))]


class Arc(ts.nn.ParallelLinear):
    """A layer of the user's, which computes with its own part."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is self._parameters["weight"]
        part = ts.nn.functional.parallel_linear(x, F.normalize(self.weight), None, 1)
        return ts.distributed.gather(part)


def readers() -> None:
    x = torch.randn(4, 6)
    torch.manual_seed(3)
    layer = Arc(6, 8, bias=False, dim=1)
    torch.manual_seed(3)
    close(layer(x), F.linear(x, F.normalize(nn.Linear(6, 8, bias=False).weight)))
    torch.optim.SGD([layer.weight])  # outside of a forward it is the parameter

    half = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    column_and_row(half.layers[1], Torchshard())
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad(), pytest.raises(LayoutError, match="use_nested_tensor = False"):
        half(x, src_key_padding_mask=padding)


def torchshard() -> None:
    everything(Torchshard())
    readers()


def test_torch_reads_the_whole_weight_and_a_users_forward_its_part(ranks):
    ranks(2).run(torchshard)
