"""A few steps of SGD under NaiveDDP and under its reference: equal to 1e-12 in float64."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.reference import ReferenceDDP

DIM = 4
Loss = Callable[[nn.Module, Tensor], Tensor]


def part(step: int, micro: int = 0, rows: int = 5) -> Tensor:
    """This rank's microbatch, (rows, DIM)."""
    draw = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    return torch.randn(rows, DIM, generator=draw, dtype=torch.float64)


def follow(
    ddp: NaiveDDP,
    reference: ReferenceDDP,
    loss: Loss,
    *,
    steps: Iterable[int] = range(3),
    num_micro: int = 1,
    reduce_each: bool = False,
) -> None:
    """Both train on the same parts; gradients after each step, and so weights, are equal."""
    for step in steps:
        ddp.zero_grad(), reference.zero_grad()
        for micro in range(num_micro):
            loss(ddp, part(step, micro)).backward()
            loss(reference, part(step, micro)).backward()
            if reduce_each or micro == num_micro - 1:
                reference.average()
        expect_equal(ddp.module, reference.module)
        descend(ddp), descend(reference)


def expect_equal(mine: nn.Module, truth: nn.Module) -> None:
    """Values and gradients of all parameters; of a sparse gradient what it means."""
    for (name, p), q in zip(mine.named_parameters(), truth.parameters(), strict=True):
        near(p.detach(), q.detach(), f"{name}, the value")
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            near(p.grad.detach().to_dense(), q.grad.detach().to_dense(), f"{name}, the gradient")


def near(mine: Tensor, truth: Tensor, what: str) -> None:
    tolerance = 1e-12 if truth.dtype in (torch.float64, torch.complex128) else 1e-6
    torch.testing.assert_close(mine, truth, rtol=0, atol=tolerance, msg=lambda m: f"{what}: {m}")


def descend(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad.detach().to_dense(), alpha=0.01)


def both(make: Callable[[], nn.Module], **options) -> tuple[NaiveDDP, ReferenceDDP]:
    """The same module in both wrappers, in float64, begun from unlike values on each rank."""
    torch.manual_seed(dist.get_rank())
    net = make()
    torch.manual_seed(dist.get_rank())
    return NaiveDDP(net, **options), ReferenceDDP(make())


def squares(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().sum()
