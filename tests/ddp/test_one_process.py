"""NaiveDDP against one process on the whole batch, in float64.

Each case runs a few steps of SGD on every rank's part of a batch; weights and gradients must
be those of one process that sees all of it, whatever the graph does.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from tests.ddp.one_process import (
    PER_RANK,
    batches,
    build,
    expect_same,
    plainly,
    train,
    under_checkpoint,
)
from tests.each import each
from torchdistpackage.ddp.naive_ddp import NaiveDDP


def same_as_one_process(mode: str, wrap: dict, options: dict) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    forward = under_checkpoint if mode == "outer checkpoint" else plainly
    data = batches(size)
    truth = train(build(mode), data, forward, **options)
    model = build(mode)
    with torch.no_grad():
        for p in model.parameters():
            p += rank  # broadcast must undo this
    ddp = NaiveDDP(model, num_grad_acc_iter=2, **wrap)
    mine = data[:, :, rank * PER_RANK : (rank + 1) * PER_RANK].clone()
    expect_same(train(ddp, mine, forward, **options), truth)
    bases = {p.grad._base.data_ptr() for p in model.parameters() if p.grad is not None}
    assert len(bases) <= ddp.reducer.num_buckets, "every gradient must be a view of its bucket"


MODES = ["plain", "reentrant", "non-reentrant", "nested", "two outputs", "outer checkpoint"]


@pytest.mark.few(1)
@pytest.mark.parametrize("cap", [0.0002, 25])
def test_gradients_are_those_of_one_process(ranks, cap):
    ranks(2).run(each, same_as_one_process, [(mode, {"bucket_cap_mb": cap}, {}) for mode in MODES])


WAYS = [
    ({"sync": True}, {}),
    ({}, {"set_to_none": False}),
    ({}, {"between": True}),  # set to none between forward and backward
    ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}, {"set_to_none": False}),
]


def test_every_way_of_zeroing_and_waiting_is_right(ranks):
    ranks(3).run(each, same_as_one_process, [("plain", *way) for way in WAYS])


def no_sync_accumulates(num_quiet: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = batches(size)[0, 0]
    one = build("plain")
    for _ in range(num_quiet + 1):
        one(x).square().mean().backward()
    ddp = NaiveDDP(build("plain"))
    mine = x[rank * PER_RANK : (rank + 1) * PER_RANK]
    for i in range(num_quiet + 1):
        with ddp.no_sync() if i < num_quiet else nullcontext():
            ddp(mine).square().mean().backward()
    ddp.reduce_gradients()
    ddp.reduce_gradients()
    for (name, p), q in zip(one.named_parameters(), ddp.module.parameters(), strict=True):
        if p.grad is None:
            assert q.grad is None, name
        else:
            torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=1e-12)


def test_no_sync_accumulates_and_the_next_backward_reduces_once(ranks):
    ranks(2).run(each, no_sync_accumulates, [(0,), (1,), (2,)])


def two_forwards_one_backward() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    data = batches(size)[0]
    one = build("plain")
    (one(data[0]).square().mean() + one(data[1]).square().mean()).backward()
    ddp = NaiveDDP(build("plain"), bucket_cap_mb=0.0002)
    for _ in range(2):  # the second time buckets leave early
        ddp.zero_grad()
        part = data[:, rank * PER_RANK : (rank + 1) * PER_RANK]
        (ddp(part[0]).square().mean() + ddp(part[1]).square().mean()).backward()
    expect_same(
        [{n: p.grad for n, p in ddp.module.named_parameters()}],
        [{n: p.grad for n, p in one.named_parameters()}],
    )


def test_two_forwards_with_one_backward(ranks):
    ranks(2).run(two_forwards_one_backward)


class Fails(torch.autograd.Function):
    armed = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Fails.armed:
            raise ArithmeticError("in the middle")
        return grad


def exception_then_good_step() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = batches(size)[0, 0]
    mine = x[rank * PER_RANK : (rank + 1) * PER_RANK]
    one = build("plain")
    one(x).square().mean().backward()
    ddp = NaiveDDP(build("plain"), bucket_cap_mb=0.0002)
    net = ddp.module
    ddp(mine).square().mean().backward()  # the first reduction learns, later ones leave early
    whole, net.block = net.block, lambda y: Fails.apply(whole(y))
    ddp.zero_grad()
    Fails.armed = True
    with pytest.raises(ArithmeticError, match="in the middle"):
        ddp(mine).square().mean().backward()
    Fails.armed = False
    ddp.zero_grad()
    ddp(mine).square().mean().backward()
    expect_same(
        [{n: p.grad for n, p in net.named_parameters()}],
        [{n: p.grad for n, p in one.named_parameters()}],
    )


def test_a_good_step_follows_an_exception_in_the_middle_of_backward(ranks):
    ranks(2).run(exception_then_good_step)


def moved(net: torch.nn.Module) -> None:
    net.float().double()


def replaced(net: torch.nn.Module) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data * 0.5


def gradients_with_other_memory(change, set_to_none: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = batches(size)[0, 0]
    mine = x[rank * PER_RANK : (rank + 1) * PER_RANK]
    one, ddp = build("plain"), NaiveDDP(build("plain"), bucket_cap_mb=0.0002)
    for _ in range(3):
        for net, part in ((one, x), (ddp, mine)):
            net.zero_grad(set_to_none=set_to_none)
            net(part).square().mean().backward()
        expect_same(
            [{n: p.grad for n, p in ddp.module.named_parameters()}],
            [{n: p.grad for n, p in one.named_parameters()}],
        )
        change(one), change(ddp)


def test_gradients_that_were_given_other_memory_come_back(ranks):
    cases = [(change, to_none) for change in (moved, replaced) for to_none in (True, False)]
    ranks(2).run(each, gradients_with_other_memory, cases)
