"""A caller that runs many backwards says which are the last; buckets leave in those."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ddp.one_process import expect_same
from torchdistpackage.ddp.bucket_comm import ReducerParts
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.scheduled_ready import LastBackwardPolicy
from torchdistpackage.errors import CommError

DIM, PER_RANK = 4, 2
TINY_BYTES = 8 * DIM
"""A bucket for each parameter."""


class Two(nn.Module):
    """Two layers, one that nobody uses; the first may run twice under a reentrant checkpoint."""

    def __init__(self, twice: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.spare = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.twice = twice
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.twice:
            for _ in range(2):
                x = checkpoint(self.first, x, use_reentrant=True)
            return self.second(x.tanh())
        return self.second(self.first(x).tanh())


def samples(step: int) -> Tensor:
    """(microbatch, rank, sample, DIM)."""
    draw = torch.Generator().manual_seed(step)
    shape = (3, dist.get_world_size(), PER_RANK, DIM)
    return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()


def loss(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().mean()


def truth(step: int, twice: bool = False) -> dict[str, Tensor | None]:
    one = Two(twice)
    for x in samples(step).unbind():
        loss(one, x).backward()
    return {n: p.grad for n, p in one.named_parameters()}


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: p.grad for n, p in module.named_parameters()}


def reducer_of(module: nn.Module, *, last: tuple[str, ...] = ()) -> Reducer:
    group = dist.group.WORLD
    return Reducer(
        [
            ParamSpec(n, p, group, group.size(), deferred=n in last)
            for n, p in module.named_parameters()
        ],
        cap_bytes=TINY_BYTES,
        parts=ReducerParts(scheduled_ready=LastBackwardPolicy),
    )


def only_in_final_blocks(twice: bool) -> None:
    """Nothing before the last backward, then each bucket at once; the unused one is told of."""
    module = Two(twice)
    reducer = reducer_of(module)
    events: list[object] = []
    reducer.on_launch = events.append
    for step in range(3):
        module.zero_grad()
        events.clear()
        mine = samples(step)[:, dist.get_rank()]
        with reducer.scheduled() as told, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reentrant checkpointing, of its use
            for x in mine[:-1]:
                loss(module, x).backward()
                events.append("backward")
            with told.last_backward():
                loss(module, mine[-1]).backward()
            events.append("last backward")
            told.complete(module.parameters())
            events.append("told")
        reducer.finish()
        expect_same([grads(module)], [truth(step, twice)])
        plan = [s.name for b in reducer.grad_buckets.buckets for s in _members(reducer, b)]
        assert plan == ["spare.weight", "second.weight", "first.weight"]
        before, end = ["backward"] * 2, ["last backward", "told"]
        # the first that is due is unused, and all others wait for it
        assert events == before + end[:1] + ([] if step else end[1:]) + [0, 1, 2] + end[1:] * bool(
            step
        )


def _members(reducer: Reducer, bucket) -> list[ParamSpec]:
    return [reducer.specs[i] for i in bucket.members]


@pytest.mark.parametrize("twice", [False, True], ids=["plain", "reentrant checkpoint"])
def test_buckets_leave_where_the_caller_says_that_gradients_are_the_last(ranks, twice):
    ranks(2).run(only_in_final_blocks, twice)


def pending_ones_wait() -> None:
    """Two blocks: what is pending in the first leaves in the second."""
    module = Two()
    reducer = reducer_of(module, last=("spare.weight",))
    events: list[object] = []
    reducer.on_launch = events.append
    for step in range(2):
        module.zero_grad()
        events.clear()
        mine = samples(step)[:, dist.get_rank()]
        with reducer.scheduled() as told:
            loss(module, mine[0]).backward()
            with told.last_backward(still_pending={id(module.first.weight)}):
                # the second layer's last gradient is in the middle of the run
                loss(module, mine[1]).backward()
            events.append("first block")
            module.second.requires_grad_(False)
            with told.last_backward():
                loss(module, mine[2]).backward()
            events.append("second block")
            module.second.requires_grad_(True)
        events.append("run")
        reducer.finish()
        names = [_members(reducer, b)[0].name for b in reducer.grad_buckets.buckets]
        assert names == ["second.weight", "first.weight", "spare.weight"]
        blocks = ["first block", "second block"]
        early = [0, "first block", 1, "second block"] if step else [*blocks, 0, 1]
        assert events == [*early, "run", 2], "a tied one (`last`) leaves in finish()"


def test_pending_parameters_wait_for_their_own_last_backward(ranks):
    ranks(2).run(pending_ones_wait)


def more_than_was_said() -> None:
    module = Two()
    reducer = reducer_of(module)
    mine = samples(0)[:, dist.get_rank()]
    for _ in range(2):  # in the first nothing has left, but it is as wrong
        with (
            pytest.raises(CommError, match="weight received a gradient after it was taken for"),
            reducer.scheduled() as told,
        ):
            with told.last_backward():
                loss(module, mine[0]).backward()
            told.complete(module.parameters())
            loss(module, mine[1]).backward()
        module.zero_grad()
        with reducer.scheduled() as told:
            for x in mine[:-1]:
                loss(module, x).backward()
            with told.last_backward():
                loss(module, mine[-1]).backward()
            told.complete(module.parameters())
        reducer.finish()
        expect_same([grads(module)], [truth(0)])


@pytest.mark.own_transport(
    "refuses a mistake that is a write in flight, which the late transport names first"
)
def test_a_gradient_after_the_last_is_refused_and_the_next_step_is_right(ranks):
    ranks(2).run(more_than_was_said)


def wrapper_inside() -> None:
    """What hooks of a wrapper's forward would do is not done inside; outside all is as ever."""
    ddp = NaiveDDP(Two(), bucket_cap_mb=0.0001)
    launched: list[int] = []
    ddp.reducer.on_launch = launched.append
    for step in range(3):
        ddp.zero_grad()
        mine = samples(step)[:, dist.get_rank()]
        with ddp.reducer.scheduled():
            for x in mine:
                loss(ddp, x).backward()
            assert not launched
        ddp.reducer.finish()
        assert len(launched) == ddp.reducer.num_buckets
        expect_same([grads(ddp.module)], [truth(step)])
        ddp.zero_grad()
        for i, x in enumerate(mine):
            with ddp.no_sync() if i < 2 else warnings.catch_warnings():
                loss(ddp, x).backward()
        expect_same([grads(ddp.module)], [truth(step)])
        launched.clear()


def test_a_wrappers_own_hooks_do_nothing_inside(ranks):
    ranks(2).run(wrapper_inside)
