"""Each class of optimizer, sharded, steps as it does alone."""

import warnings

import pytest
import torch
from torch import nn, optim

from tests.ddp.zero.plain_twin import (
    STEPS,
    Net,
    batch,
    build,
    equals_the_plain_one,
    loss_of,
    plain_loop,
)
from tests.ddp.zero.shared_out import assert_same
from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import world
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.ddp.zero.shard_bounds import ELEMENTWISE, MATRIXWISE

SMALL_SET = ("ASGD", "Adagrad", "Adam", "SGD")
"""With numbers, with state from the start, with the most, with the least."""


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "name",
    [n if n in SMALL_SET else pytest.param(n, marks=pytest.mark.full) for n in sorted(ELEMENTWISE)],
)
def test_each_class_steps_as_it_does_alone(ranks, name: str, stage: int):
    ranks(3).run(equals_the_plain_one, name, plain_loop, {}, {"stage": stage})


FUSED = {"fused": True, "lr": torch.tensor(2e-2)}


@pytest.mark.few(2)
@pytest.mark.parametrize("more", [{"foreach": True}, {"foreach": False}, FUSED], ids=str)
def test_options_stay_what_they_are(ranks, more: dict):
    ranks(2).run(equals_the_plain_one, "AdamW", plain_loop, more, {"stage": 2})


def linear(name: str) -> None:
    """Gradients are sums of few binary digits, exact in any order, and so is all that follows."""
    me, size = world().rank(), world().size()

    def made() -> tuple[nn.Module, optim.Optimizer]:
        net = nn.ModuleList(nn.Linear(6, n, bias=False) for n in (4, 9, 3)).double()
        draw = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype))
        return net, getattr(optim, name)(net.parameters(), lr=1e-2)

    (net, inner), (twin, reference) = made(), made()
    optimizer = ZeroOptimizer(inner, net, bucket_cap_mb=1e-4)
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        for n, (p, q) in enumerate(zip(net.parameters(), twin.parameters(), strict=True)):
            shape = size, *q.shape
            factors = torch.randint(-8, 8, shape, generator=draw).double() * 2**n
            (p * factors[me]).sum().backward()
            (q * factors).sum().div(size).backward()
        optimizer.reducer.watch(torch.ones(()))
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    assert_same(dict(net.state_dict()), dict(twin.state_dict()))
    assert_same(optimizer.state_dict(), reference.state_dict())


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sorted(MATRIXWISE))
def test_a_class_that_reads_whole_matrices_steps_as_it_does_alone(ranks, name: str):
    ranks(2).run(linear, name)


def as_torch_shards_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its package compiles with what torch has deprecated
        from torch.distributed.optim import ZeroRedundancyOptimizer

    me, size = world().rank(), world().size()
    net, twin = Net(), Net()
    optimizer = ZeroOptimizer(build("AdamW", net), net)
    theirs = ZeroRedundancyOptimizer(
        [p for p in twin.parameters() if p.requires_grad], optim.AdamW, lr=1e-2
    )
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    for step in range(STEPS):
        x = batch(step, size)[me]
        loss_of(net, x).backward()
        loss_of(twin, x).backward()
        for p in twin.parameters():
            if p.grad is not None:
                primitives.all_reduce(p.grad, world()).div_(size)
        optimizer.step()
        theirs.step()
        optimizer.zero_grad()
        theirs.zero_grad()
    torch.testing.assert_close(net.state_dict(), twin.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.late_in_full
def test_it_steps_as_torchs_own_zero(ranks):
    ranks(2).run(as_torch_shards_it)
