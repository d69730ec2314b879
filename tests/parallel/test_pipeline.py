"""The pipeline against one process: every depth, any number of microbatches, any message."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchdistpackage.comm.p2p import Post
from torchdistpackage.comm.record import calls
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.errors import CommError, ScheduleError
from torchdistpackage.parallel.pipeline import executor as executor_module
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.flatten import (
    flat_and_partition,
    flatten_model,
    flatten_sequence,
    partition_balanced,
    partition_uniform,
)
from torchdistpackage.parallel.pipeline.forward_backward import forward_backward, forward_eval
from torchdistpackage.schedule.actions import flatten
from torchdistpackage.schedule.generate import build
from torchdistpackage.topology.views import topology

DIM = 4
CPU = torch.device("cpu")


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


@pytest.mark.parametrize("depth", range(1, 9))
def test_every_depth_and_number_of_microbatches_gives_the_gradient_of_one_process(ranks, depth):
    numbers = [1, 3, 8, 16] if depth > 4 else list(range(1, 17))
    ranks(depth).run(every_number_of_microbatches, "1f1b", numbers, 19, timeout_s=60)


@pytest.mark.parametrize("depth", [2, 3])
def test_gpipe_gives_the_same(ranks, depth):
    ranks(depth).run(every_number_of_microbatches, "gpipe", [1, 2, 7], 16, timeout_s=60)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("depth", range(5, 9))
def test_every_microbatch_number_at_great_depth(ranks, depth, schedule):
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


def static_executor(num_steps: int) -> None:
    """Live outputs stay bounded; messages after the first step carry no header; evaluation in
    between, with another number of microbatches, leaves training bitwise alone."""
    rank, p, m = dist.get_rank(), dist.get_world_size(), 8
    group = dist.group.WORLD
    stage = layers(p)[rank]
    live: list[weakref.ref] = []
    peak = 0

    def run_step(executor, num, train):
        nonlocal peak
        xs = samples(2 * num)[0].split(2)

        def forward(i, received):
            nonlocal peak
            out = stage(xs[i] if rank == 0 else received)
            if train:
                live.append(weakref.ref(out))
                peak = max(peak, sum(r() is not None for r in live))
            return out.square().sum() if rank == p - 1 else out

        executor.run(forward)

    def train(with_eval):
        nonlocal stage
        stage = layers(p)[rank]
        optimizer = torch.optim.Adam(stage.parameters(), lr=0.01)
        training = Executor(build("1f1b", p, m), group, device=CPU)
        evaluation = Executor(build("forward", p, 3), group, device=CPU)
        for _ in range(num_steps):
            if with_eval:
                run_step(evaluation, 3, False)
            optimizer.zero_grad()
            run_step(training, m, True)
            optimizer.step()
        return [q.detach().clone() for q in stage.parameters()]

    plain = train(False)
    gc.collect()
    assert peak <= min(m, p - rank), f"{peak} live outputs on stage {rank}"
    assert all(map(torch.equal, plain, train(True)))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_activations_are_bounded_and_evaluation_changes_nothing(ranks, depth):
    ranks(depth).run(static_executor, 3)


def batched_exchanges_and_waits() -> None:
    """The steady state posts send and receive as one batch, and all messages are waited for."""
    rank, p, m = dist.get_rank(), dist.get_world_size(), 4
    stage = layers(p)[rank]
    posted, headers = [], []
    with pytest.MonkeyPatch.context() as patch:
        issue, encode = Post._issue, executor_module.encode
        patch.setattr(
            Post, "_issue", lambda post, all: posted.append([x[0] for x in all]) or issue(post, all)
        )
        patch.setattr(executor_module, "encode", lambda *a: headers.append(1) or encode(*a))
        executor = Executor(build("1f1b", p, m), dist.group.WORLD, device=CPU, timeout_s=20)
        x = samples(m)[0].split(1)
        forward = lambda i, r: (  # noqa: E731
            stage(r).sum() if rank == p - 1 else stage(x[i] if rank == 0 else r)
        )
        executor.run(forward)
        first = len(headers)
        posted.clear()
        executor.run(forward)
    last = calls.snapshot(num=2 * m)["calls"]
    assert {(call["operation"], call["state"]) for call in last} == {
        ("send", "done"),
        ("receive", "done"),
    }
    program = executor.schedule.programs[rank]
    assert {call["action"] for call in last} == {
        str(a) for a in flatten(program) if a.kind.is_message
    }
    assert first == (m if rank < p - 1 else 0) and len(headers) == first
    if rank == 0:
        assert ["send", "receive"] in posted, "sends of small messages go first"


def test_steady_state_is_batched_and_every_work_is_waited_on(ranks):
    ranks(2).run(batched_exchanges_and_waits)


def changed_shape_is_refused() -> None:
    rank = dist.get_rank()
    executor = Executor(build("forward", 2, 1), dist.group.WORLD, device=CPU, timeout_s=20)
    for n in (2, 3):
        forward = lambda i, r, n=n: torch.zeros(n, 4) if rank == 0 else r  # noqa: E731
        if n == 2:
            executor.run(forward)
        elif rank == 0:
            with pytest.raises(
                CommError,
                match=r"stage 0 sends float32\[3, 4\] for microbatch 0, .*float32\[2, 4\]",
            ):
                executor.run(forward)


def test_a_changed_shape_is_refused_before_it_is_sent(ranks):
    ranks(2).run(changed_shape_is_refused)


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
    with pytest.raises(CommError, match=r"by stage they have \[4, 5\]"):
        forward_backward(None, lambda v: v, None, torch.zeros(4 + rank, 1), 2)
    with pytest.raises(CommError, match="4 samples cannot fill 8 microbatches; use at most 4"):
        forward_backward(None, lambda v: v, None, torch.zeros(4, 1), 8)


def test_inputs_that_do_not_fit_are_refused_on_every_rank(ranks):
    ranks(2).run(disagreeing_inputs_are_refused)


def test_models_are_flattened_and_cut_without_processes():
    model = nn.ModuleDict(
        {
            "a": nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.ReLU())),
            "b": nn.Linear(2, 8),
        }
    )
    double = lambda x: x * 2  # noqa: E731
    flat = flatten_model(model, ["a", double, "b"])
    assert len(flat) == 4 and torch.equal(flat[2](torch.ones(1)), torch.full((1,), 2.0))
    assert [type(m).__name__ for m in flatten_sequence(list(flat), 1)] == [
        "Linear",
        "ReLU",
        "ReLU",
        "CallableModule",
        "Linear",
    ]
    with pytest.raises(ScheduleError, match="has no 'c'; its children are a, b"):
        flatten_model(model, ["c"])
    seven = [nn.Linear(1, 1) for _ in range(7)]
    heavy = [nn.Linear(1, n) for n in (1, 1, 8, 1)]
    lengths, weights = [], []
    for rank in range(4):
        with tpc.using(topology([("pipe", 4)], 4), rank):
            lengths.append(len(partition_uniform(seven)))
            weights.append(len(partition_balanced(heavy)))
            assert len(
                flat_and_partition([nn.Sequential(*seven)], partition_policy="balanced")
            ) in (1, 2)
    assert lengths == [2, 2, 2, 1] and weights == [1, 1, 1, 1]
    with pytest.raises(ScheduleError, match="no partition policy 'random'"):
        flat_and_partition(seven, partition_policy="random")
