"""torchshard's cross entropy of split logits equals torch's own in one process."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchdistpackage.compat.torchshard as ts
from tests.compat.sharded import by_world, close, start
from tests.tells import facts_pattern
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
    with pytest.raises(LayoutError, match=r"dim 1 or the last one, .* split along dim 0"):
        functional(ts.distributed.scatter(logits.repeat(2, 1).t()).t(), target)


@by_world
def test_a_split_loss_is_torchs(ranks, world, size):
    ranks(world).run(losses, size)


def more_dims(size: int) -> None:
    """Batch, positions and classes: one loss however many ranks share the classes."""
    start(size)
    logits, target = 9 * torch.randn(3, 2, 8), torch.randint(8, (3, 2))
    target[1, 1] = 7
    target[2, 0] = -100
    split = ts.distributed.scatter
    for options in (
        {},
        {"reduction": "sum"},
        {"reduction": "none", "weight": torch.rand(8)},
        {"ignore_index": 7, "label_smoothing": 0.1},
    ):
        given = {"ignore_index": -100, **options}
        kept = target.where((target != -100) | (given["ignore_index"] == -100), 7)
        flat, *ours = (logits.clone().requires_grad_() for _ in range(5))
        expected = F.cross_entropy(flat.view(6, 8), kept.view(6), **given)
        expected.sum().backward()
        criterion = ts.nn.ParallelCrossEntropyLoss(**given)
        for x, found in (
            (ours[0], criterion(split(ours[0]), kept)),
            (ours[1], criterion(ours[1], kept)),
            (ours[2], criterion(ours[2].movedim(-1, 1), kept)),  # torch's own order
            (ours[3], F.cross_entropy(split(ours[3]).transpose(1, 2), target=kept, **given)),
        ):
            assert found.shape == (kept.shape if given.get("reduction") == "none" else ())
            close(found, expected.view(found.shape))
            found.sum().backward()
            close(x.grad, flat.grad)
    square, ids = logits[:, :, :2], target.clamp(0, 1)
    with pytest.raises(LayoutError, match=facts_pattern("(3, 2, 2)", "targets (3, 2)", "dim 1")):
        criterion(square, ids)
    with pytest.raises(LayoutError, match=r"takes classes as dim 1, .* split along dim 2"):
        F.cross_entropy(split(logits), target)


@pytest.mark.parametrize("size", [1, 2])
def test_a_loss_of_more_dims_is_that_of_flat_logits(ranks, size):
    ranks(size).run(more_dims, size)


def marked_by_hand() -> None:
    """Of what is marked by hand only the name of the function says whether it is a part."""
    start(2)
    whole, target = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1])
    part = whole.chunk(2, -1)[ts.distributed.get_rank()].clone()
    for operation in (
        lambda x: x,
        lambda x: x.float().double(),
        lambda x: x.view(2, 3, -1).view(6, -1),
        lambda x: ts.distributed.gather(x[ts.distributed.get_rank() * 3 :][:3], 0),
    ):
        x = whole.clone()
        ts.register_parallel_dim(x, -1)
        with pytest.raises(LayoutError, match=r"all 8 classes or this rank's part of 16; leave"):
            nn.CrossEntropyLoss()(operation(x), target)
    ts.register_parallel_dim(part, -1)
    close(ts.nn.ParallelCrossEntropyLoss()(part, target), F.cross_entropy(whole, target))
    # with what is known to be a part, it is one; and a mark does not undo what is known
    known = ts.distributed.scatter(whole)
    close(F.cross_entropy(known + 0 * part, target), F.cross_entropy(whole, target))
    uneven = ts.nn.ParallelLinear(8, 7, dim=1)
    logits = uneven(whole)
    expected = F.cross_entropy(logits, target)
    ts.register_parallel_dim(logits, 1)
    assert ts.get_parallel_dim(logits) == 1
    close(F.cross_entropy(logits, target), expected)
    ts.register_parallel_dim(x, None)
    close(F.cross_entropy(x, target), F.cross_entropy(whole, target))


def test_torchs_own_loss_refuses_a_mark_by_hand(ranks):
    ranks(2).run(marked_by_hand)


FIRST = """
import torch
import torch.nn.functional as F
import torchdistpackage.compat.torchshard as ts
from torchdistpackage import setup_distributed
setup_distributed()
ts.distributed.init_process_group()
logits, target = torch.randn(6, 8), torch.randint(8, (6,))
part = ts.distributed.scatter(logits)
torch.testing.assert_close(F.cross_entropy(part, target), F.cross_entropy(logits, target))
print("done")
"""


@pytest.mark.full
def test_torchs_own_loss_of_a_part_needs_no_other_name_before():
    found = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert found.stdout.strip().endswith("done"), found.stderr
