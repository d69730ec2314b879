"""torchshard's cross entropy of split logits equals torch's own in one process."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchdistpackage.compat.torchshard as ts
from tests.compat.sharded import by_world, close, start
from torchdistpackage.errors import LayoutError


def losses(size: int) -> None:
    start(size)
    warnings.filterwarnings("ignore", "size_average and reduce args")  # torch's own, and ours
    logits, target = 9 * torch.randn(12, 10), torch.randint(10, (12,))
    target[3] = -100
    weight = torch.rand(10)
    for options in (
        {},
        {"weight": weight},
        {"label_smoothing": 0.2},
        {"size_average": False},
        {"reduce": False},
    ):
        for reduction in ("none", "mean", "sum"):
            x, y = (logits.clone().requires_grad_() for _ in range(2))
            expected = nn.CrossEntropyLoss(reduction=reduction, **options)(x, target)
            part = ts.distributed.scatter(y)
            criterion = ts.nn.ParallelCrossEntropyLoss(reduction=reduction, **options)
            for found in (criterion(part, target), criterion(y, target)):
                close(found, expected)
                assert found.shape == expected.shape
            shape = (3, 4) if reduction == "none" and "size_average" not in options else ()
            expected.sum().backward()
            criterion(part, target).sum().backward()
            close(y.grad, x.grad)
            functional = ts.nn.functional.parallel_cross_entropy
            # a view between, and torch's own name for it
            seen = ts.distributed.scatter(logits.view(3, 4, 10)).view(-1, 10 // size)
            if not {"size_average", "reduce"} & set(options):
                found = F.cross_entropy(seen, target, reduction=reduction, **options)
                close(found, functional(part, target, reduction=reduction, **options).detach())
            assert shape == () or expected.numel() == 12
    grouped = ts.nn.functional.ParallelCrossEntropy.apply(
        ts.distributed.scatter(logits), target, None, None, -100, None, "sum"
    )
    close(grouped, F.cross_entropy(logits, target, reduction="sum"))
    with pytest.raises(LayoutError, match="split along C"):
        functional(ts.distributed.scatter(logits.view(3, 4, 10)), target.view(3, 4))


@by_world
def test_a_split_loss_is_torchs(ranks, world, size):
    ranks(world).run(losses, size)
