"""Losses of functions in `forward_backward`: masked targets, any order of microbatches."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.parallel.pipeline.test_counted_losses import counted, masked
from tests.parallel.pipeline.test_losses import OUT_OF_ORDER
from tests.parallel.pipeline.whole_model import DIM, batch, chain, same, same_gradients, squares
from torchdistpackage import NaiveDDP, ZeroOptimizer, forward_backward
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError


def out_of_order() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    rank = tpc.get_pp_rank()
    x, y = batch(7)
    truth, mine = chain(2), chain(2)
    expected = squares(truth(x), y).detach()
    step = (
        (lambda h: mine[0](h))
        if rank == 0
        else (lambda given: squares(mine[1](given[0]), given[1]))
    )
    found = forward_backward(None, step, None, [x] if rank == 0 else [y], 3, schedule=OUT_OF_ORDER)
    if rank == 1:
        same(found, expected)


def test_microbatches_of_functions_may_come_in_any_order(ranks):
    ranks(2).run(out_of_order)


def functions(own_backward: bool, numbers: tuple[int, ...]) -> None:
    """Of `forward_backward`, with replicas of unequal counts."""
    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    rank, data = tpc.get_pp_rank(), tpc.get_dp_rank()
    truth = chain(2)
    expected = F.cross_entropy(truth(masked(0, 12)[0]), masked(0, 12)[1])
    expected.backward()
    x, y = masked(6 * data, 6 * data + 6)
    bwd_fn = (
        (lambda output, gradient: torch.autograd.backward(output, gradient))
        if own_backward
        else None
    )
    for number in numbers:
        stage = chain(2)[rank]
        ddp = NaiveDDP(stage)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

        def fwd_fn(given, stage=stage):
            return counted(stage(given[0]), given[1]) if rank else stage(given)

        for _ in range(3):
            told = forward_backward(
                optimizer, fwd_fn, bwd_fn, y if rank else x, number, reducer=ddp.reducer
            )
            same_gradients({rank: stage}, truth)
            if rank:
                same(told, expected.detach())
        mine = forward_backward(None, fwd_fn, None, y if rank else x, number, forward_only=True)
        if rank:
            same(mine, F.cross_entropy(truth(x), y).detach())


@pytest.mark.parametrize(
    ("own_backward", "numbers"),
    [
        (False, (3,)),
        *(pytest.param(own, (1, 2, 3), marks=pytest.mark.full) for own in (False, True)),
    ],
)
def test_functions_may_return_sums_and_counts(ranks, own_backward, numbers):
    ranks(4).run(functions, own_backward, numbers)


def by_zero() -> None:
    """A ZeroOptimizer, whose shards hold the sums."""
    tpc.setup_process_groups([("data", 2), ("pipe", 1)])
    truth, stage = chain(1), chain(1)
    F.cross_entropy(truth(masked(0, 12)[0]), masked(0, 12)[1]).backward()
    optimizer = ZeroOptimizer(torch.optim.SGD(stage.parameters(), lr=0.1), stage, stage=2)
    x, y = masked(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
    fwd_fn = lambda given: counted(stage(given[0]), given[1])  # noqa: E731
    for _ in range(2):
        before = [p.detach().clone() for p in stage.parameters()]
        for p, b in zip(truth.parameters(), before, strict=True):
            p.data.copy_(b)
        truth.zero_grad()
        F.cross_entropy(truth(masked(0, 12)[0]), masked(0, 12)[1]).backward()
        forward_backward(optimizer, fwd_fn, None, [x, y], 3, reducer=optimizer.reducer)
        optimizer.step()
        optimizer.finish()
        for p, b, whole in zip(stage.parameters(), before, truth.parameters(), strict=True):
            same(p.detach(), b - 0.1 * whole.grad)


def test_functions_and_a_zero_optimizer(ranks):
    ranks(2).run(by_zero)


def no_loss_of_functions() -> None:
    tpc.setup_process_groups([("pipe", 1)])
    stage = chain(1)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    x, y = masked(0, 6)
    loss = lambda given: counted(stage(given[0]), given[1])  # noqa: E731
    with pytest.raises(CommError, match="without the optimizer"):
        forward_backward(None, loss, None, [x, y], 2)
    mean = lambda given: F.cross_entropy(stage(given[0]), given[1])  # noqa: E731
    with pytest.raises(CommError, match="microbatch 0 is a mean over no targets"):
        forward_backward(optimizer, mean, None, [x, y], 3)
    for value in (lambda v: v[:, :1], lambda v: v.sum().reshape(1), lambda v: {"loss": v.sum()}):
        with pytest.raises(CommError, match="not one number; return the mean"):
            forward_backward(optimizer, lambda given, f=value: f(stage(given)), None, x, 6)
    # without a backward these are two means
    two = lambda given: (given.mean(), given.square().mean())  # noqa: E731
    found = forward_backward(None, two, None, x, 4, forward_only=True)
    same(torch.stack(found), torch.stack(two(x)))


def test_what_is_no_loss_of_a_function_is_refused_by_name(pool):
    pool(1).run(no_loss_of_functions)


def one_number_a_sample() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    rank = dist.get_rank()
    truth = nn.Sequential(chain(2), nn.Linear(DIM, 1).double())
    stage = nn.Sequential(truth[0][1], truth[1]) if rank else truth[0][0]
    for num in (4, 5, 7):
        x = torch.randn(num, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(num))
        for number in (1, 2, 3, 4):
            found = forward_backward(
                None, stage, None, None if rank else x, number, forward_only=True
            )
            if rank:
                same(found, truth(x).detach())


@pytest.mark.late_in_full
def test_a_head_of_one_number_is_joined(ranks):
    ranks(2).run(one_number_a_sample)


def sums_of_microbatches() -> None:
    """What the earlier package leaves: the sum over microbatches, the mean times their number."""
    tpc.setup_process_groups([("pipe", 2)])
    rank, number = dist.get_rank(), 3
    truth, stage = chain(2), chain(2)[rank]
    x = torch.randn(6, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for part in x.chunk(number):
        truth(part).square().mean().backward()
    fwd_fn = lambda h: stage(h).square().mean() * number if rank else stage(h)  # noqa: E731
    forward_backward(None, fwd_fn, None, None if rank else x, number)
    same_gradients({rank: stage}, truth)


@pytest.mark.late_in_full
def test_a_loss_times_the_microbatches_leaves_the_gradient_of_their_sum(ranks):
    ranks(2).run(sums_of_microbatches)
