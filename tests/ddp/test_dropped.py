"""Layers whose wrapper was dropped sum their partial gradients again at once, and a backward that
is still to come reduces: nothing here waits for Python to collect garbage, which is off."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.test_own_groups import CLOSE, Net, backward, expect, whole
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.bucket_comm import GradBuckets
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import CommError


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def rows(group) -> Tensor:
    return whole(4, 2, 4, seed=10).chunk(group.size())[group.rank()]


def zero(net: nn.Module, **options) -> ZeroOptimizer:
    return ZeroOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), net, **options)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise RuntimeError("planted")


# Each trains in a wrapper; what it returns stays alive while the plain module is trained.


def wrapped(net: Net, group, refs: list) -> object:
    ddp = NaiveDDP(net)
    for _ in range(4):  # buckets are packed anew
        ddp.zero_grad()
        loss = ddp(rows(group)).square().sum()
        loss.backward()
    refs += [ref(ddp), ref(ddp.reducer)]
    return loss


def never_backward(net: Net, group, refs: list) -> object:
    ddp = NaiveDDP(net)
    refs += [ref(ddp), ref(ddp.reducer)]
    return ddp(rows(group)), ddp(rows(group)).square().sum()


def refreshed(net: Net, group, refs: list) -> object:
    ddp = NaiveDDP(net)
    ddp.refresh()
    with ddp.no_sync():
        ddp(rows(group)).sum().backward()
    with ddp.reducer.scheduled() as steered, steered.last_backward():
        net(rows(group)).sum().backward()
    ddp.reduce_gradients()
    refs += [ref(ddp), ref(ddp.reducer)]
    return None


def failed(net: Net, group, refs: list) -> object:
    ddp = NaiveDDP(net)
    out = ddp(rows(group))
    with pytest.raises(RuntimeError, match="planted"):
        (out.sum() + Fails.apply(net.up.weight).sum()).backward()
    refs += [ref(ddp), ref(ddp.reducer)]
    return out


def sharded(stage: int) -> Callable[[Net, object, list], object]:
    def run(net: Net, group, refs: list) -> object:
        optimizer = zero(net, stage=stage, bucket_cap_mb=1e-5)
        for _ in range(2):
            loss = net(rows(group)).square().sum()
            loss.backward()
            optimizer.step()
        if stage == 3:
            optimizer.finish()
        refs += [ref(optimizer), ref(optimizer.reducer)]
        return loss

    return run


WAYS = [wrapped, never_backward, refreshed, failed, *map(sharded, (1, 2, 3))]


def dropped(world) -> None:
    tpc.setup_process_groups(world)
    group = tpc.get_group("tensor")
    for way in WAYS:
        with no_garbage_collection():
            net, refs = Net(group), list[ref]()
            kept = way(net, group, refs)
            assert [gone() for gone in refs] == [None, None], way
            net.zero_grad()
            backward(net, group, 0)
            expect(net, group, 1)
            del kept


@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_layer_sums_at_once_when_its_wrapper_is_dropped(ranks, data):
    ranks(2 * data).run(dropped, [("data", data), ("tensor", 2)])


def trained_between() -> None:
    """The layers sum in the plain module's training, and the reducer in the backward after it."""
    tpc.setup_process_groups([("tensor", 2)])
    group = tpc.get_group("tensor")
    net = Net(group)
    loss = NaiveDDP(net)(rows(group)).square().sum()
    for run in (lambda: backward(net, group, 0), loss.backward, lambda: backward(net, group, 0)):
        net.zero_grad()
        run()
        expect(net, group, 1)


def test_outputs_of_a_dropped_wrapper_still_reduce_after_the_plain_module_was_trained(ranks):
    ranks(2).run(trained_between)


class Looking(nn.Module):
    """Sees row `step` of a table, and numbers of this rank."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(8, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor, row: int) -> Tensor:
        return self.last(x.tanh() + self.table(torch.tensor([row])))


def one_forward(run: nn.Module, x: Tensor) -> object:
    loss = run(x, 1).square().sum()
    del run
    loss.backward()
    return loss


def two_forwards(run: nn.Module, x: Tensor) -> object:
    """One backward for two outputs, and another one for a third."""
    first, second, third = (run(x * i, i) for i in (1, 2, 3))
    del run
    (first.square().sum() + second.sum()).backward()
    third.square().sum().backward()
    return first, second, third


def penalized(run: nn.Module, x: Tensor) -> object:
    """The hooks run in torch.autograd.grad as well, which gives parameters nothing."""
    x = x.requires_grad_()
    out = run(x, 1)
    del run
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (slope.square().sum() + out.sum()).backward()
    return out


def living() -> list[str]:
    kinds = (NaiveDDP, Reducer, GradBuckets, Looking)
    return [type(x).__name__ for x in gc.get_objects() if type(x) in kinds]


def unnamed() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = [whole(5, 4, seed=r) for r in range(size)]
    torch.manual_seed(0)
    start = Looking()
    for use in (one_forward, two_forwards, penalized):
        sums = [torch.zeros_like(p) for p in start.parameters()]
        for part in parts:  # each with gradients of its own; then the mean, in one process
            one = copy.deepcopy(start)
            use(one, part.clone())
            for total, p in zip(sums, one.parameters(), strict=True):
                total += p.grad / size
        del one
        net = copy.deepcopy(start)
        with no_garbage_collection():
            kept = use(NaiveDDP(net), parts[rank].clone())
            assert living() == ["Looking", "Looking"], "the start and the net"
            assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
            for p, wanted in zip(net.parameters(), sums, strict=True):
                torch.testing.assert_close(p.grad, wanted, **CLOSE)
            del net, p
            assert living() == ["Looking"], "what is left of it is its outputs' graph"
        del kept


def test_a_wrapper_without_a_name_reduces_and_is_freed(ranks):
    ranks(2).run(unnamed)


def without_a_backward() -> None:
    net = Looking()
    with no_garbage_collection():
        out = NaiveDDP(net)(torch.zeros(1, 4, dtype=torch.float64), 1)
        assert "NaiveDDP" not in living() and "Reducer" not in living()
        del out
        assert living() == ["Looking"]
        net.out = NaiveDDP(net)(torch.zeros(1, 4, dtype=torch.float64), 1)  # as in a cache
        del net
    assert living() == []


def test_outputs_that_are_dropped_without_a_backward_leave_nothing(ranks):
    ranks(2).run(without_a_backward)


def too_late() -> None:
    """What nobody is left to reduce is refused."""
    tpc.setup_process_groups([("tensor", 2)])
    net = Net(tpc.get_group("tensor"))
    loss = NaiveDDP(net)(rows(tpc.get_group("tensor"))).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(CommError, match=r"no longer exists.*until the last backward"):
        loss.backward()
    optimizer = zero(net)
    loss = net(rows(tpc.get_group("tensor"))).sum()
    del optimizer
    with pytest.raises(CommError, match="no longer exists"):
        loss.backward()


def test_a_backward_for_which_nobody_is_left_is_refused(ranks):
    ranks(2).run(too_late)
