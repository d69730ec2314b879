"""The pipelined step around functions of one's own, against one process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.tells import facts_pattern
from torchdistpackage.comm.backends import GLOO, register_transport
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.compat.torchdistpackage.forward_backward import forward_backward, forward_eval
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.errors import CommError

DIM = 4


def layers(depth: int) -> nn.Sequential:
    torch.manual_seed(depth)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(depth))
    ).double()


def samples(n: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(n)
    make = lambda: torch.randn(n, DIM, generator=draw, dtype=torch.float64)  # noqa: E731
    return make(), make()


def mean_loss(model, x, y):
    return (model(x) - y).square().mean()


def expect_gradients(stage: nn.Module, index: int, whole: nn.Sequential) -> None:
    for mine, truth in zip(stage.parameters(), whole[index].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, truth.grad, rtol=0, atol=1e-12)


def every_number_of_microbatches(schedule: str, numbers: list[int], batch: int) -> None:
    """forward_backward; batches that do not divide are weighted by their samples."""
    rank, p = dist.get_rank(), dist.get_world_size()
    tpc.setup_process_groups([("pipe", p)])
    x, y = samples(batch)
    whole = layers(p)
    truth = mean_loss(whole, x, y)
    truth.backward()
    stage = layers(p)[rank]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

    def fwd_fn(given):
        given = given if isinstance(given, list) else [given]
        out = stage(given[0])
        return (out - given[-1]).square().mean() if rank == p - 1 else out

    mine = [v for v, here in ((x, rank == 0), (y, rank == p - 1)) if here]
    for m in numbers:
        before = forward_eval(fwd_fn, mine)
        loss = forward_backward(optimizer, fwd_fn, None, mine, m, schedule=schedule)
        if rank == p - 1:
            torch.testing.assert_close(loss, truth.detach(), rtol=0, atol=1e-12)
            torch.testing.assert_close(before, truth.detach(), rtol=0, atol=1e-12)
        else:
            assert loss is None
        expect_gradients(stage, rank, whole)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "depth",
    [n if n in (2, 3, 4, 8) else pytest.param(n, marks=pytest.mark.full) for n in range(1, 9)],
)
def test_every_depth_and_number_of_microbatches_gives_the_gradient_of_one_process(ranks, depth):
    numbers = [3, 16] if depth > 4 else [1, 2, 5, 16]
    ranks(depth).run(every_number_of_microbatches, "1f1b", numbers, 19, timeout_s=60)


@pytest.mark.parametrize("depth", [2, 3])
def test_gpipe_gives_the_same(ranks, depth):
    ranks(depth).run(every_number_of_microbatches, "gpipe", [1, 2, 7], 16, timeout_s=60)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("depth", range(1, 9))
def test_every_number_of_microbatches_at_every_depth(ranks, depth, schedule):
    ranks(depth).run(every_number_of_microbatches, schedule, list(range(1, 17)), 16, timeout_s=120)


def own_functions_and_rich_messages() -> None:
    """Dicts with integers, bools, None, empty and unused tensors, through 3 stages."""
    rank, p = dist.get_rank(), dist.get_world_size()
    tpc.setup_process_groups([("pipe", p)])
    x, y = samples(6)
    torch.manual_seed(0)
    weights = [torch.randn(DIM, DIM, dtype=torch.float64, requires_grad=True) for _ in range(p)]

    def stage_of(i, given):
        if i == 0:
            (x,) = given
            ids = torch.arange(x.shape[0])
            return {
                "h": x @ weights[0],
                "skip": x @ weights[0] * 2,
                "ids": ids,
                "none": None,
                "mask": ids > 0,
                "empty": x[:0],
                "unused": (x @ weights[0]).sum(1),
            }
        d, *rest = given
        if i < p - 1:
            d = dict(d)
            d["h"] = torch.tanh(d["h"] @ weights[i]) * d["mask"][:, None]
            return d
        assert d["none"] is None and d["empty"].shape == (0, DIM)
        return (
            ((d["h"] @ weights[i] + d["skip"] - rest[0]) * (1 + d["ids"][:, None])).square().mean()
        )

    def one_process(x, y):
        given = stage_of(0, [x])
        for i in range(1, p):
            given = stage_of(i, [given, y] if i == p - 1 else [given])
        return given

    truth = [torch.zeros_like(w) for w in weights]
    for part_x, part_y in zip(x.split(2), y.split(2), strict=True):
        grads = torch.autograd.grad(one_process(part_x, part_y) / 3, weights)
        truth = [t + g for t, g in zip(truth, grads, strict=True)]

    calls = []

    def bwd_fn(output, gradient):
        calls.append(gradient is None)
        if gradient is None:
            output.backward()
        else:
            pairs = [
                (o, g) for o, g in zip(output.values(), gradient, strict=True) if g is not None
            ]
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])

    for own in (None, bwd_fn):
        weights[rank].grad = None
        inputs = [x] if rank == 0 else [y] if rank == p - 1 else []
        fwd = lambda given: stage_of(rank, given if isinstance(given, list) else [given])  # noqa: E731
        forward_backward(None, fwd, own, inputs, 3)
        torch.testing.assert_close(weights[rank].grad, truth[rank], rtol=0, atol=1e-12)
    assert calls == [rank == p - 1] * 3


def test_messages_may_hold_anything_and_functions_may_be_ones_own(ranks):
    ranks(3).run(own_functions_and_rich_messages)


def with_naive_ddp(direct: bool) -> None:
    """data 2 x pipe 2: the wrapper counts microbatches, or hands its reducer to the step."""
    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    stage_index, data_index = tpc.get_pp_rank(), tpc.get_dp_rank()
    x, y = samples(8)
    whole = layers(2)
    mean_loss(whole, x, y).backward()
    stage = layers(2)[stage_index]
    ddp = NaiveDDP(stage, num_grad_acc_iter=1 if direct else 4, bucket_cap_mb=0.0001)
    model = ddp.module if direct else ddp
    x, y = x.chunk(2)[data_index], y.chunk(2)[data_index]

    def fwd_fn(given):
        if stage_index == 0:
            return model(given)
        return (model(given[0]) - given[1]).square().mean()

    for _ in range(2):
        ddp.zero_grad()
        forward_backward(
            None,
            fwd_fn,
            None,
            x if stage_index == 0 else y,
            4,
            reducer=ddp.reducer if direct else None,
        )
        expect_gradients(stage, stage_index, whole)


@pytest.mark.parametrize("direct", [True, False])
def test_naive_ddp_reduces_once_after_the_last_microbatch(ranks, direct):
    ranks(4).run(with_naive_ddp, direct)


def disagreeing_inputs_are_refused() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    rank = dist.get_rank()
    with pytest.raises(CommError, match=r"by pipe rank they have \[4, 5\]"):
        forward_backward(None, lambda v: v, None, torch.zeros(4 + rank, 1), 2)
    with pytest.raises(CommError, match=facts_pattern("4 samples", "8 microbatches", "most 4")):
        forward_backward(None, lambda v: v, None, torch.zeros(4, 1), 8)


def test_inputs_that_do_not_fit_are_refused_on_every_rank(ranks):
    ranks(2).run(disagreeing_inputs_are_refused)


def batches_kept_elsewhere() -> None:
    """A loop that moves its batch inside `fwd_fn`, over a group whose messages have a place of
    their own: gloo, taken for a back end that queues."""
    rank, m = dist.get_rank(), 2
    register_transport(replace(GLOO, direct=False, queued=True))
    try:
        tpc.setup_process_groups([("data", 2), ("pipe", 2)])
        first = rank % 2 == 0
        x, y = samples(4)
        whole, stage = layers(2), layers(2)[rank % 2]
        mean_loss(whole, x, y).backward()
        moved = list((x if first else y).chunk(m)) * 2

        def fwd_fn(given):
            own = moved.pop(0)
            if first:
                assert given.is_meta
                return stage(own)
            return (stage(given[0]) - own).square().mean()

        kept = (x if first else y).to("meta")
        forward_backward(None, fwd_fn, None, kept, m)
        expect_gradients(stage, rank % 2, whole)
        moved.insert(0, x if first else y)
        seen = forward_eval(fwd_fn, kept)
        assert seen.device.type == "cpu"
    finally:
        register_transport(GLOO)


def test_messages_arrive_where_the_group_has_them_wherever_the_batch_is_kept(ranks):
    ranks(4).run(batches_kept_elsewhere)
