"""Loops of one's own with `Pipeline`, and a mistake."""

from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage import Pipeline, tpc
from torchdistpackage.testing import ParityModel

DIM, BATCH, BLOCKS = 8, 8, 4


class Halved(torch.autograd.Function):
    """The identity, whose backward is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / 2


def squared_error(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).square().mean()


def pipeline(wrong: str) -> ParityModel:
    """Four blocks on the pipe ranks; `halved`: the second rank passes back half of the gradient."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(BLOCKS)]
    rank, num = tpc.get_group_rank("pipe"), BLOCKS // tpc.get_group_size("pipe")
    names = range(rank * num, (rank + 1) * num)
    stage = nn.ModuleDict({str(i): blocks[i] for i in names}).double()

    def forward(x: Tensor) -> Tensor:
        if wrong == "halved" and rank == 1:
            x = Halved.apply(x)
        for block in stage.values():
            x = block(x)
        return x

    pipe = Pipeline(forward, loss=squared_error, num_microbatches=2)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)

    def step(fed: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = pipe.step(fed[0], targets=fed[1])
        optimizer.step()
        return loss

    return ParityModel(stage, step, optimizer)


def batch(number: int, index: int, num: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, DIM, generator=draw, dtype=torch.float64)
    return x.chunk(num)[index], x.flip(1).chunk(num)[index]
