"""Two wrappers in one process: in one graph, over one parameter, in whatever order they are used.

Each is held against one process that does the same on all parts and takes the mean.
"""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.against_reference import DIM, near, part
from torchdistpackage.ddp.naive_ddp import NaiveDDP

SMALL_MIB = 0.0001
"""Room for one layer."""
Loss = Callable[[nn.Module, nn.Module, Tensor], Tensor]


class Optional(nn.Module):
    """`first` is used, or not."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return self.second(self.first(x) if use else x)


class Headed(nn.Module):
    def __init__(self, body: nn.Module):
        super().__init__()
        self.body, self.head = body, nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def follow_one_process(nets: list[nn.Module], options: dict, step: Callable) -> None:
    """`step(nets, rank, index)` runs the backwards of one step on a rank's part."""
    ones = copy.deepcopy(nets)
    ddps = [NaiveDDP(net, **options) for net in nets]
    rank, size = dist.get_rank(), dist.get_world_size()
    for index in range(5):
        for net in [*nets, *ones]:
            net.zero_grad()
        step(ddps, rank, index)
        for r in range(size):
            step(ones, r, index)
        for net, one in zip(nets, ones, strict=True):
            for (name, p), q in zip(net.named_parameters(), one.parameters(), strict=True):
                near(p.grad, q.grad / size, f"step {index}, {name}")


def conditional(keep_order: bool) -> None:
    """Only rank 0 uses the layer of the wrapper that the backward reaches first."""

    def step(nets: list[nn.Module], rank: int, index: int) -> None:
        lower, upper = nets
        x = torch.full((3, DIM), rank + index + 1.0, dtype=torch.float64)
        use = rank == 0 or index % 2 == 0
        upper(torch.tanh(lower(x, True)), use).square().sum().backward()

    torch.manual_seed(0)
    nets = [Optional().double(), Optional().double()]
    follow_one_process(nets, {"keep_order": keep_order, "bucket_cap_mb": SMALL_MIB}, step)


@pytest.mark.parametrize("keep_order", [True, False])
def test_wrappers_in_one_graph_send_in_one_order_on_all_ranks(ranks, keep_order):
    ranks(2).run(conditional, keep_order)


def one_body(together: bool, dim: int, options: dict) -> None:
    def step(nets: list[nn.Module], rank: int, index: int) -> None:
        x = torch.full((3, dim), 0.1 * (rank + index + 1), dtype=torch.float64)
        losses = [net(x).square().sum() for net in nets]
        if together:
            sum(losses).backward()
        else:
            for loss in losses:
                loss.backward()

    torch.manual_seed(0)
    body = nn.Linear(dim, DIM)
    nets = [Headed(body).double(), Headed(body).double()]
    follow_one_process(nets, options, step)


@pytest.mark.few(2)
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dim", [DIM, 1000], ids=["small", "large"])
def test_two_wrappers_may_share_a_submodule(ranks, together, dim):
    for options in ({}, {"bucket_cap_mb": SMALL_MIB}):
        ranks(2).run(one_body, together, dim, options)


def twice_around() -> None:
    net = nn.Linear(DIM, 1).double()
    one, ddp = copy.deepcopy(net), NaiveDDP(NaiveDDP(net))
    one.load_state_dict(ddp.state_dict())
    for step in range(4):
        ddp.zero_grad(), one.zero_grad()
        ddp(part(step)).sum().backward()
        one(part(step)).sum().backward()
        for p, q in zip(net.parameters(), one.parameters(), strict=True):
            dist.all_reduce(q.grad)
            near(p.grad, q.grad / dist.get_world_size(), f"step {step}")


def test_a_wrapper_may_be_wrapped(ranks):
    ranks(2).run(twice_around)
