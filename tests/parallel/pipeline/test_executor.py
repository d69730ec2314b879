"""One executor for every schedule: the gradient of one process, and memory that stays bounded."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.parallel.pipeline.whole_model import DIM, batch, chain, same, same_gradients
from tests.tells import facts_pattern
from torchdistpackage.errors import ScheduleError
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.schedule.actions import ActionKind
from torchdistpackage.schedule.generators import GENERATORS, build

CPU = torch.device("cpu")
TRAINS = sorted(set(GENERATORS) - {"forward"})


def every_schedule(names: list[str], numbers: list[int]) -> None:
    """Twice each: the first run describes its messages, the second posts receives ahead."""
    group, rank = dist.group.WORLD, dist.get_rank()
    for name in names:
        for m in numbers:
            schedule = build(name, group.size(), m)
            last = schedule.num_stages - 1
            x, y = batch(m)
            xs, ys = x.split(1), y.split(1)
            whole, copy = chain(last + 1), chain(last + 1)
            expected = (whole(x) - y).square().sum()
            expected.backward()
            mine = {s: copy[s] for s in schedule.stages_of(rank)}
            executor = Executor(schedule, group, device=CPU, timeout_s=60)
            assert executor.stages == tuple(mine)
            for _ in range(2):
                losses = []

                def forward(s, i, received, mine=mine, xs=xs, ys=ys, last=last, losses=losses):
                    out = mine[s](xs[i] if s == 0 else received)
                    if s < last:
                        return out
                    losses.append((out - ys[i]).square().sum())
                    return losses[-1]

                copy.zero_grad()
                executor.run(forward)
                same_gradients(mine, whole)
                if losses:
                    same(torch.stack(losses).sum().detach(), expected.detach())


@pytest.mark.few(1)
@pytest.mark.parametrize("depth", [3, 1, 2, 4])
def test_every_schedule_gives_the_gradient_of_one_process(ranks, depth):
    numbers = {1: [3], 2: [1, 2, 5], 3: [4], 4: [8]}[depth]
    ranks(depth).run(every_schedule, TRAINS, numbers, timeout_s=60)


@pytest.mark.full
@pytest.mark.parametrize("name", TRAINS)
@pytest.mark.parametrize("depth", range(2, 9))
def test_every_schedule_at_every_depth_and_number_of_microbatches(ranks, depth, name):
    ranks(depth).run(every_schedule, [name], list(range(1, 17)), timeout_s=300)


def bounded_and_undisturbed(num_steps: int) -> None:
    """In 1F1B; then the same steps with evaluation of another number of microbatches between."""
    rank, p, m = dist.get_rank(), dist.get_world_size(), 8
    group = dist.group.WORLD
    live: list[weakref.ref] = []
    peak = 0

    def run_step(executor, stage, num, train):
        nonlocal peak
        xs = batch(2 * num)[0].split(2)
        ends: list[weakref.ref] = []

        def forward(_, i, received):
            nonlocal peak
            out = stage(xs[i] if rank == 0 else received)
            ones = torch.ones_like(out)
            out = out * ones  # whose graph keeps it; the output itself goes when it is sent
            if train:
                live.append(weakref.ref(ones))
                del ones
                peak = max(peak, sum(r() is not None for r in live))
            ends.append(weakref.ref(out))
            return out.square().sum() if rank == p - 1 else out

        executor.run(forward)
        assert not any(end() is not None for end in ends), "an output outlives its run"

    def train(with_eval):
        stage = chain(p)[rank]
        optimizer = torch.optim.Adam(stage.parameters(), lr=0.01)
        training = Executor(build("1f1b", p, m), group, device=CPU)
        evaluation = Executor(build("forward", p, 3), group, device=CPU)
        for _ in range(num_steps):
            if with_eval:
                run_step(evaluation, stage, 3, False)
            optimizer.zero_grad()
            run_step(training, stage, m, True)
            optimizer.step()
        return [q.detach().clone() for q in stage.parameters()]

    plain = train(False)
    gc.collect()
    assert peak == min(m, p - rank), f"{peak} live forwards on stage {rank}"
    assert all(map(torch.equal, plain, train(True)))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_live_forwards_are_bounded_and_evaluation_changes_nothing(ranks, depth):
    ranks(depth).run(bounded_and_undisturbed, 3)


def kept_outputs_and_spans() -> None:
    """What `keep` takes stays; a recorded run says when each computation was, and each wait."""
    rank, p, m = dist.get_rank(), dist.get_world_size(), 3
    schedule = build("zb-h1", p, m)
    stage, kept, kinds = chain(p)[rank], {}, []
    executor = Executor(schedule, dist.group.WORLD, device=CPU)
    x = torch.ones(1, DIM).double()

    class Around:
        def __init__(self, kind):
            kinds.append(kind)

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    def forward(s, i, received):
        out = stage(received if s else x * i)
        return out if s < p - 1 else out.sum()

    for record in (False, True):
        executor.run(
            forward,
            keep=lambda s, i, output: kept.setdefault((s, i), output),
            around=Around,
            record=record,
        )
        assert bool(executor.spans) == record
    assert sorted(kept) == [(rank, i) for i in range(m)]
    computed = [a for a in schedule.programs[rank] if hasattr(a, "kind") and not a.kind.is_message]
    assert kinds == [a.kind for a in computed] * 2
    spans = executor.spans
    assert [s.action for s in spans if not s.action.kind.is_message] == computed
    waits = [s.action.kind for s in spans if s.action.kind.is_message]
    assert waits == [ActionKind.RECV_B if rank < p - 1 else ActionKind.RECV_F] * m
    times = [t for s in spans for t in (s.start, s.end)]
    assert times == sorted(times) and times[0] >= 0
    busy = sum(s.end - s.start for s in spans if not s.action.kind.is_message)
    assert 0 < executor.clock.timing().computed_s() <= busy <= executor.clock.timing().elapsed_s()


def test_outputs_are_kept_on_request_and_a_run_can_be_recorded(ranks):
    ranks(2).run(kept_outputs_and_spans)


def for_another_number_of_ranks() -> None:
    with pytest.raises(ScheduleError, match=facts_pattern("1f1b", "3 pipe", "2")):
        Executor(build("1f1b", 3, 1), dist.group.WORLD, device=CPU)


def test_a_schedule_for_another_number_of_ranks_is_refused(ranks):
    ranks(2).run(for_another_number_of_ranks)
