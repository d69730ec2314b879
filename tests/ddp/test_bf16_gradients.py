"""bf16 parameters have fp32 sums: over microbatches, over ranks, and in one bucket (R32)."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchdistpackage.ddp.naive_ddp import NaiveDDP

NUM_MICRO, SIZE = 64, 200


class Weighs(nn.Module):
    """Its gradient is its input, to the bit."""

    def __init__(self, size: int = SIZE):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def gradients(rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    return (torch.rand(NUM_MICRO, SIZE, generator=draw) + 0.5).bfloat16()


def microbatches(ddp: NaiveDDP) -> Tensor:
    """Reduces all of them once; returns the mean in fp64 of the same bf16 gradients."""
    for x in gradients(dist.get_rank()):
        ddp(x).backward()
    whole = torch.stack([gradients(r).double().sum(0) for r in range(dist.get_world_size())])
    return whole.mean(0)


def accumulated() -> None:
    ddp = NaiveDDP(Weighs(), num_grad_acc_iter=NUM_MICRO, fp32_grads=True)
    for _ in range(2):
        ddp.zero_grad()
        truth = microbatches(ddp)
        bucket = ddp.module.weight.grad
        assert bucket.dtype == torch.float32
        torch.testing.assert_close(bucket.double(), truth, rtol=1e-5, atol=0)


@pytest.mark.late_in_full
def test_64_microbatches_on_8_ranks_are_within_1e_5_of_their_fp64_sum(ranks):
    ranks(8).run(accumulated)


def cast_at_the_end() -> None:
    """A plain torch optimizer gets bf16, rounded once, and one line says so."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("torchdistpackage.ddp")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        ddp = NaiveDDP(Weighs(), num_grad_acc_iter=NUM_MICRO)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            truth = microbatches(ddp)
            grad = ddp.module.weight.grad
            assert grad.dtype == torch.bfloat16
            torch.testing.assert_close(grad.double(), truth, rtol=2**-8, atol=0)
            assert (grad == truth.float().bfloat16()).float().mean() > 0.99
            optimizer.step()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert len([line for line in lines if "bf16" in line or "bfloat16" in line]) == 1


def test_a_plain_optimizer_gets_one_cast_and_one_line_says_so(ranks):
    ranks(2).run(cast_at_the_end)


def kept_between_reductions() -> None:
    """Without zeroing, what was cast goes on as the start of the next sum."""
    ddp = NaiveDDP(Weighs(), fp32_grads=True)
    x = torch.full((SIZE,), 1.0, dtype=torch.bfloat16)
    small = torch.full((SIZE,), 2.0**-12, dtype=torch.bfloat16)
    ddp(x).backward()
    ddp(small).backward()
    assert torch.equal(ddp.module.weight.grad, torch.full((SIZE,), 1 + 2.0**-12))


def test_a_small_gradient_is_not_lost_beside_a_large_one(ranks):
    ranks(2).run(kept_between_reductions)


def mixed_buckets() -> None:
    net = nn.ModuleList([Weighs(), nn.Linear(3, 3)])
    net.forward = lambda x: net[0](x) + net[1](torch.ones(1, 3)).sum()
    ddp = NaiveDDP(net, fp32_grads=True)
    x = torch.full((SIZE,), dist.get_rank() + 1.0, dtype=torch.bfloat16)
    ddp(x).backward()
    assert torch.equal(net[0].weight.grad, torch.full((SIZE,), 1.5))
    assert torch.equal(net[1].weight.grad, torch.ones(3, 3))


@pytest.mark.full
def test_fp32_and_bf16_parameters_in_one_module(ranks):
    ranks(2).run(mixed_buckets)
