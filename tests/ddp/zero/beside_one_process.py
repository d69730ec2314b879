"""What tests of the stages share: ZeRO on part of a batch beside one process on all of it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn, optim

from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer

DIM, PER_RANK = 6, 2
TINY = 0.0004
"""MiB: buckets of a parameter or two."""

Build = Callable[[], nn.Module]
Run = Callable[[nn.Module, Tensor, int], Tensor]
"""(net, x, index of the rank or -1 for one process) -> loss, the mean over the rows of x."""


def adamw(net: nn.Module) -> optim.Optimizer:
    """Two param groups; decay would show in a parameter that should have been left alone."""
    held = list(net.parameters())
    return optim.AdamW(
        [{"params": held[1::2], "lr": 3e-2, "weight_decay": 0.5}, {"params": held[::2]}], lr=1e-2
    )


def batches(steps: int, num_ranks: int) -> Tensor:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(steps, num_ranks * PER_RANK, DIM, generator=draw, dtype=torch.float64)


def mean_square(net: nn.Module, x: Tensor, index: int) -> Tensor:
    return net(x).square().mean()


def compare(
    build: Build,
    group: Group,
    *,
    run: Run = mean_square,
    one: Callable[[nn.Module, Sequence[Tensor]], Tensor] | None = None,
    size: int | None = None,
    index: int | None = None,
    steps: int = 4,
    set_to_none: bool = True,
    microbatches: int = 1,
    **options: object,
) -> ZeroOptimizer:
    """Train both and compare weights after each step, to the last digits of float64.

    one: (net, the parts of all ranks) -> loss of one process; default the mean over ranks of
    `run`. size, index: of the ranks that see different batches, by default those of `group`.
    """
    size = group.size() if size is None else size
    index = group.rank() if index is None else index
    plain, net = build(), build()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(index)  # the start must undo this
    truth = adamw(plain)
    zero = ZeroOptimizer(
        adamw(net),
        net,
        group=group,
        **{"bucket_cap_mb": TINY, "num_grad_acc_iter": microbatches, **options},
    )
    for x in batches(steps, size * microbatches):
        truth.zero_grad(set_to_none=set_to_none)
        zero.zero_grad(set_to_none=set_to_none)
        for micro in x.chunk(microbatches):
            parts = micro.chunk(size)
            losses = [run(plain, part, i) for i, part in enumerate(parts)]
            loss = torch.stack(losses).mean() if one is None else one(plain, parts)
            (loss / microbatches).backward()
            (run(net, parts[index], index) / microbatches).backward()
        truth.step()
        zero.step()
        expect_equal(zero, net, plain)
    return zero


def expect_equal(zero: ZeroOptimizer, net: nn.Module, plain: nn.Module) -> None:
    if zero.stage == 3:
        zero.finish()
    for (name, mine), p in zip(net.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, p, rtol=0, atol=1e-12, msg=name)
