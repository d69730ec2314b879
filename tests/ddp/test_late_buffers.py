"""Buffers follow the first rank, also those that come later; where there are none nobody looks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.ddp.naive_ddp import NaiveDDP


class Counted(nn.Module):
    """Counts how often its buffers were asked for."""

    times = 0

    def named_buffers(self, *args, **kwargs):
        self.times += 1
        return super().named_buffers(*args, **kwargs)


class Plain(Counted):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


def gains(where: str) -> None:
    """A buffer on the module, on one that is inside, or with one that is new."""
    ddp = NaiveDDP(Plain())
    ddp(torch.ones(1, 2)).sum().backward()
    ddp.module.times = 0
    ddp(torch.ones(1, 2)).sum().backward()
    assert ddp.module.times == 0
    mine = torch.full((3,), float(dist.get_rank()))
    if where == "a new module":
        ddp.module.norm = nn.Module()
        ddp.module.norm.register_buffer("seen", mine)
    else:
        (ddp.module if where == "itself" else ddp.module.layer).register_buffer("seen", mine)
    ddp(torch.ones(1, 2)).sum().backward()
    assert torch.equal(mine, torch.zeros(3))


@pytest.mark.parametrize("where", ["itself", "inside", "a new module"])
def test_a_buffer_that_came_later_follows_the_first_rank(ranks, where):
    ranks(2).run(gains, where)
