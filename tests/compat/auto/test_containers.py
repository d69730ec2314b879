"""Tensors in dataclasses and other containers are found, with their gradients."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.parallel.auto import Config, FirstOnly, Split


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Batch:
    x: Tensor
    more: list[Pair]
    name: str = "as it is"


class TakesBatches(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 7), nn.Linear(7, 4)

    def forward(self, batch: Batch) -> Batch:
        y = self.down(self.up(batch.x).tanh())
        return Batch(y, [Pair(y * 2, pair.left + pair.right) for pair in batch.more], batch.name)


def plan(num: int, full: bool) -> Config:
    return Config(
        {r"up\.": Split(num, 0), r"down\.weight": Split(num, 1), r"down\.bias": FirstOnly()},
        {"up$": {0: "copy"}},
        {"down$": {0: "sum"}},
        {},
        full_gradients=full,
    )


def as_unsplit(num_threads: int | None, num: int, full: bool | None) -> None:
    torch.manual_seed(0)
    module = TakesBatches().double()
    config = None if full is None else plan(num, full)
    split = tensor_parallel(deepcopy(module), num_threads and ["cpu"] * num_threads, config)
    xs = torch.randn(3, 2, 4, dtype=torch.float64)
    found = []
    for each in (module, split):
        leaves = [x.clone().requires_grad_() for x in xs]
        out = each(Batch(leaves[0], [Pair(*leaves[1:])]))
        assert type(out) is Batch and type(out.more[0]) is Pair and out.name == "as it is"
        values = [out.x, *out.more[0]]
        sum(v.square().sum() for v in values).backward()
        found.append(values + [leaf.grad for leaf in leaves])
    torch.testing.assert_close(found[1], found[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("full", [None, True, False])
def test_over_threads(full):
    as_unsplit(2, 2, full)
    as_unsplit(3, 3, full)


@pytest.mark.full
@pytest.mark.parametrize("full", [None, True, False])
def test_over_ranks(ranks, full):
    ranks(2).run(as_unsplit, None, 2, full)
