"""Layers whose wrapper was dropped sum their partial gradients again at once: nothing here waits
for Python to collect garbage, which is off."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from tests.ddp.test_own_groups import Net, backward, expect, whole
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
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
    ddp = NaiveDDP(net, embedding_rows=True)
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


def too_early() -> None:
    """What nobody is left to reduce is refused."""
    tpc.setup_process_groups([("tensor", 2)])
    net = Net(tpc.get_group("tensor"))
    loss = NaiveDDP(net)(rows(tpc.get_group("tensor"))).sum()
    with pytest.raises(CommError, match="dropped"):
        loss.backward()


def test_a_backward_after_its_wrapper_was_dropped_is_refused(ranks):
    ranks(2).run(too_early)
