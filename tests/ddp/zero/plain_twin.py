"""A sharded optimizer and its plain twin on one process's whole batch, in float64."""

from collections.abc import Callable

import torch
from torch import Tensor, nn, optim

from torchdistpackage.comm.creation import world
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer

DIM, PER_RANK, STEPS = 5, 2, 8
OPTIONS = {
    "ASGD": {"lr": 1e-2, "t0": 3},
    "Adadelta": {"lr": 0.5},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.25},
    "Adam": {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1},
    "RMSprop": {"lr": 1e-2, "momentum": 0.5, "centered": True},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "nesterov": True},
}


class Net(nn.Module):
    """A spare layer that nobody uses, a frozen one, one element alone."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.first = nn.Linear(DIM, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.spare = nn.Linear(3, 3)
        self.last = nn.Linear(7, 4)
        self.scale = nn.Parameter(torch.ones(1))
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.frozen(torch.tanh(self.first(x))))) * self.scale

    def groups(self) -> list[dict]:
        matrices = [p for p in self.parameters() if p.dim() == 2]
        others = [p for p in self.parameters() if p.dim() != 2]
        return [{"params": others, "lr": 5e-3}, {"params": matrices}]


def build(name: str, net: Net, **more: object) -> optim.Optimizer:
    return getattr(optim, name)(net.groups(), **{"lr": 1e-2, **OPTIONS.get(name, {}), **more})


def batch(step: int, num_ranks: int) -> Tensor:
    """(num_ranks, PER_RANK, DIM): each rank's part."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(num_ranks, PER_RANK, DIM, generator=draw, dtype=torch.float64)


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    return net(x.flatten(0, -2)).square().mean()


Loop = Callable[[nn.Module, optim.Optimizer, Callable[[int], Tensor]], object]


def plain_loop(net: nn.Module, optimizer: optim.Optimizer, x_of: Callable[[int], Tensor]) -> None:
    for step in range(STEPS):
        loss_of(net, x_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def equals_the_plain_one(name: str, loop: Loop, more: dict, options: dict) -> None:
    me, size = world().rank(), world().size()
    net, twin = Net(), Net()
    optimizer = ZeroOptimizer(build(name, net, **more), net, bucket_cap_mb=1e-4, **options)
    reference = build(name, twin, **more)
    for ours, model, whole in ((optimizer, net, False), (reference, twin, True)):
        loop(model, ours, lambda step, all_=whole: batch(step, size)[slice(None) if all_ else me])
    torch.testing.assert_close(net.state_dict(), twin.state_dict(), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        optimizer.state_dict()["param_groups"], reference.state_dict()["param_groups"]
    )
