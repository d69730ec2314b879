"""Gradients of lookups that follow a head's as rows: weights are one process's all the same."""

import gc
from functools import partial
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ddp.zero.beside_one_process import TINY, adamw, batches, compare, expect_equal
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer

VOCAB, DIM = 42, 3


class Words(nn.Module):
    """x (B, 6), numbers as ids (B, 6) -> (B,): heads tied to two tables, and one that has its own.

    padding: of the first table. uses_head: whether a forward reads the first head.
    """

    def __init__(self, padding: int | None = None, uses_head: bool = True):
        super().__init__()
        self.table = nn.Embedding(VOCAB, DIM, padding_idx=padding)
        self.small, self.own = nn.Embedding(5, DIM), nn.Embedding(7, DIM)
        self.mix = nn.Linear(DIM, DIM)
        self.head, self.small_head = nn.Linear(DIM, VOCAB, False), nn.Linear(DIM, 5, False)
        self.head.weight, self.small_head.weight = self.table.weight, self.small.weight
        self.uses_head = uses_head

    def forward(self, x: Tensor) -> Tensor:
        ids = (x * 1e6).long().abs()
        x = self.table(ids % VOCAB) + self.small(ids[:, :1] % 5) + self.own(ids % 7)
        x += 1  # in place, as a sum with positions may be
        x = torch.tanh(self.mix(x))
        scores = self.small_head(x).sum(-1)
        return scores + self.head(x).sum(-1) if self.uses_head else scores


def build(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return Words(**options).double()


def beside(model: dict, options: dict) -> None:
    zero = compare(partial(build, **model), dist.group.WORLD, embedding_rows=True, **options)
    assert zero._heads.buckets


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, {}),
        ({"padding": 1}, {"set_to_none": False}),
        ({"uses_head": False}, {"bucket_cap_mb": 1.0}),
        ({}, {"microbatches": 2, "whole": True}),
        ({}, {"microbatches": 2, "set_to_none": False, "bucket_cap_mb": 2 * TINY}),
        ({"uses_head": False}, {"offload": True, "reshard_after_forward": True}),
    ],
    ids=["plain", "padding", "no head, one bucket", "whole", "accumulated", "offload"],
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_weights_are_those_of_one_process(ranks, num_ranks, stage, model, options):
    ranks(num_ranks).run(beside, model, {**options, "stage": stage})


def leave_early() -> None:
    """The head's gradient is gone before that of the layer below it is there."""
    net = build()
    zero = ZeroOptimizer(adamw(net), net, bucket_cap_mb=TINY, embedding_rows=True)
    seen: list[tuple[int, bool]] = []
    sent: list[int] = []
    zero.reducer.on_launch = lambda b: seen.append((b, net.mix.weight.grad is None))
    begin = recorder.begin

    def noted(operation: str, group: object, x: Tensor) -> object:
        sent.append(x.numel())
        return begin(operation, group, x)

    for x in batches(2, 1):
        zero.zero_grad()
        zero.finish()
        seen.clear()
        net(x).sum().backward()
    assert [b for b, _ in seen] == [*range(len(zero._buckets))]
    assert [is_early for b, is_early in seen if b in zero._heads.buckets] == [True, True]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "begin", noted)
        zero.reducer.finish()
    assert sent and max(sent) < VOCAB * DIM / 2  # of the sums only rows are left


def test_a_head_leaves_at_the_start_of_the_backward(ranks):
    ranks(2).run(leave_early)


def drop() -> None:
    net = build()
    zero = ref(ZeroOptimizer(adamw(net), net, embedding_rows=True))
    gc.collect()
    assert zero() is None
    plain, x = build(), batches(1, 1)[0]
    for each in (plain, net):
        each(x).sum().backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_the_hooks_of_lookups_do_not_keep_an_optimizer(ranks):
    """Without it they are plain."""
    ranks(2).run(drop)


def fail_once(stage: int) -> None:
    plain, net = build(), build()
    truth = adamw(plain)
    zero = ZeroOptimizer(adamw(net), net, stage=stage, bucket_cap_mb=TINY, embedding_rows=True)
    me, size = dist.get_rank(), dist.get_world_size()
    for step, x in enumerate(batches(4, size)):
        parts = x.chunk(size)
        if step == 2:
            handle = net.mix.register_full_backward_hook(_fail)
            with pytest.raises(ValueError, match="half-way"):
                net(parts[me]).sum().backward()
            handle.remove()
        truth.zero_grad()
        zero.zero_grad()
        plain(x).square().mean().backward()
        net(parts[me]).square().mean().backward()
        truth.step()
        zero.step()
        expect_equal(zero, net, plain)


def throw_away(set_to_none: bool) -> None:
    """What lookups alone left in a backward that did not sum."""
    plain, net = build(uses_head=False), build(uses_head=False)
    truth = adamw(plain)
    zero = ZeroOptimizer(adamw(net), net, num_grad_acc_iter=2, embedding_rows=True)
    me, size = dist.get_rank(), dist.get_world_size()
    for x in batches(3, 2 * size):
        truth.zero_grad()
        parts = x.chunk(2 * size)
        for part in parts:
            (plain(part).square().mean() / len(parts)).backward()
        with zero.reducer.no_sync():
            net(parts[0]).sum().backward()
        zero.zero_grad(set_to_none=set_to_none)
        for part in (parts[me], parts[me + size]):
            (net(part).square().mean() / 2).backward()
        truth.step()
        zero.step()
        zero.zero_grad()
        expect_equal(zero, net, plain)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_batch_that_is_thrown_away_leaves_no_rows(ranks, set_to_none):
    ranks(2).run(throw_away, set_to_none)


def _fail(*_: object) -> None:
    raise ValueError("half-way")


@pytest.mark.parametrize("stage", [1, 2])
def test_a_backward_that_fails_half_way_leaves_no_rows(ranks, stage):
    ranks(2).run(fail_once, stage)


def refused() -> None:
    net = build()
    with pytest.raises(ValueError, match="embedding_rows without a module"):
        ZeroOptimizer(adamw(net), embedding_rows=True)
    with pytest.raises(ValueError, match="embedding_rows with replicas"):
        ZeroOptimizer(adamw(net), net, replicas=dist.group.WORLD, embedding_rows=True)


def test_where_it_would_do_nothing_it_is_refused(ranks):
    ranks(2).run(refused)
