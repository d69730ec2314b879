"""Modules that compute with the weights of their layers themselves, outside of the layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parallel.auto.models import randomised, same_state, twin
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.errors import LayoutError


class Reader(nn.Module):
    """Reads weights cut by rows, by columns and in groups, a bias of one shard, and a dtype."""

    def __init__(self):
        super().__init__()
        self.words, self.rows, self.tied = nn.Embedding(11, 6), nn.Linear(6, 7), nn.Linear(6, 11)
        self.tied.weight = self.words.weight
        self.groups = nn.ConvTranspose1d(6, 6, 1, groups=2)
        self.drop = nn.Dropout(0.5)

    def read(self, x):
        x = F.linear(x, self.rows.weight, self.rows.bias) @ self.rows.weight
        x = self.groups(x.mT.to(self.rows.weight.dtype))
        x = F.conv_transpose1d(x, self.groups.weight, groups=2).mT.clone()
        return x.mul_(self.tied.bias[:6]).add_(self.rows.bias[0])  # which writes to no weight

    def forward(self, ids, again: bool):
        x = self.words(ids) * self.words.embedding_dim**0.5 / self.rows.out_features
        x = x.relu() if isinstance(self.rows, nn.Linear) else x
        x = x.view(-1, 4, self.tied.in_features) / self.groups.groups / self.groups.out_channels
        x = checkpoint(self.read, x, use_reentrant=False) if again else self.read(x)
        return self.tied(x) + self.tied.bias, F.linear(x, self.drop(self.words.weight))


def as_one(num: int | None, again: bool) -> None:
    """Two steps, as of one process. num: threads; None: ranks."""
    torch.manual_seed(0)
    model = randomised(Reader()).eval()
    split = tensor_parallel(twin(model), num and ["cpu"] * num, distributed=num is None)
    for _ in range(2):
        found = []
        for each in (split, model):
            each.zero_grad()
            outputs = each(torch.arange(8).view(2, 4), again)
            sum(x.square().mean() for x in outputs).backward()
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter -= 0.01 * (parameter.grad if parameter.grad is not None else 0)
            found.append(outputs)
        torch.testing.assert_close(*found, atol=1e-11, rtol=0)
        same_state(split, model)
    # a shard that drops a weight's elements waits for the others before it locks the generators
    dropped = split.train()(torch.arange(4).view(2, 2), False)[1]
    assert dropped.isfinite().all()


@pytest.mark.parametrize("num", [3, pytest.param(2, marks=pytest.mark.full)])
def test_over_threads(num):
    as_one(num, again=False)


@pytest.mark.parametrize("num", [3, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.late_in_full
def test_over_ranks_and_computed_again(ranks, num):
    ranks(num).run(as_one, None, True)


class Writer(nn.Module):
    """Keeps the norm of a weight, as some did before parametrizations."""

    def __init__(self, write: Any):
        super().__init__()
        self.layer, self.write = nn.Linear(4, 6), write

    def forward(self, x):
        with torch.no_grad():
            self.write(self.layer.weight)
        return self.layer(x)


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.clamp_(-1, 1),
        lambda weight: weight.data.mul_(2),
        lambda weight: weight.__setitem__(0, 0.0),
        lambda weight: weight.__imul__(2),
        lambda weight: torch.mul(weight, 2, out=weight),
    ],
    ids=["in place", "data", "item", "operator", "out"],
)
def test_a_write_to_a_part_is_refused(write):
    split = tensor_parallel(Writer(write), ["cpu"] * 2)
    with pytest.raises(LayoutError, match="writes to the weight of a layer that is split"):
        split(torch.randn(2, 4))


def test_outside_of_a_forward_it_is_the_parameter():
    split = tensor_parallel(Reader(), ["cpu"] * 2)
    layer: Any = split.module_shards[0].rows
    assert layer.weight is layer.tp_wrapped_module.weight
    assert layer.weight.shape == (layer.out_features, layer.in_features) == (4, 6)
