"""Loops of one's own with `Pipeline` or layers that tensor ranks share, and a mistake in each."""

from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage import NaiveDDP, Pipeline, tpc
from torchdistpackage.parallel import ParallelMlp
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


def shared_layers(wrong: str) -> ParityModel:
    """An MLP on the tensor ranks; `drawn`: as it is drawn, by each rank for itself."""
    torch.manual_seed(0)
    norm, head = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
    first, second = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
    mlp = ParallelMlp(DIM, 4 * DIM)
    if wrong != "drawn":
        layers = {"up": first, "down": second}
        mlp.from_full({f"{n}.{k}": x for n, m in layers.items() for k, x in m.named_parameters()})
    net = nn.Sequential(norm, mlp, head).double()
    model, optimizer = NaiveDDP(net), torch.optim.AdamW(net.parameters(), lr=0.01)

    def step(fed: tuple[Tensor, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = squared_error(model(fed[0]), fed[1])
        loss.backward()
        optimizer.step()
        return loss

    return ParityModel(net, step, optimizer)


def batch(number: int, index: int, num: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, DIM, generator=draw, dtype=torch.float64)
    return x.chunk(num)[index], x.flip(1).chunk(num)[index]
