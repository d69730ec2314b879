"""What the tests of torchshard's names share: groups, whole tensors from parts, a tolerance."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torchdistpackage.compat.torchshard as ts

WORLDS = [(1, 1), (2, 2), (4, 2)]
by_world = pytest.mark.parametrize(("world", "size"), WORLDS)


def start(size: int) -> None:
    ts.distributed.init_process_group(size)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)


def whole(part: Tensor, dim: int) -> Tensor:
    """The parts of all ranks of my group, also of uneven length."""
    parts: list[Tensor] = [torch.empty(0)] * ts.distributed.get_group_size()
    dist.all_gather_object(parts, part.detach(), group=ts.distributed.get_group())
    return torch.cat(parts, dim)


def close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-13)
