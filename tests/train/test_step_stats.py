"""Numbers of a step as on a device: they leave with it, and are read after the next is issued."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.streams import Stream
from tests.streams import stream as stream  # a fixture
from tests.train import parity
from tests.train.test_nonfinite import BASE
from torchdistpackage.comm.moments import OnHost
from torchdistpackage.parallel.pipeline.losses import totals_on
from torchdistpackage.plan.run_plan import TASK_ROOM, VOTE_ROOM
from torchdistpackage.plan.traffic import STEP_NUMBERS
from torchdistpackage.train.step_stats import Period, StepStats
from torchdistpackage.train.votes import Votes

CUDA = torch.device("cuda")


def test_a_step_on_a_device_lasts_until_the_next_one_begins(stream: Stream):
    first = Period(CUDA)
    stream.now_s += 10
    first.end()
    stream.now_s += 2  # the host was late
    second = Period(CUDA)
    first.end_with(second)
    stream.now_s += 7
    second.end()
    stream.now_s += 1000  # a validation
    assert stream.waits == []
    assert first.seconds() == pytest.approx(12)
    assert second.seconds() == pytest.approx(7)


def test_tokens_are_counted_beyond_what_a_float32_tells_apart():
    for device in ("cpu", "meta"):
        assert totals_on(torch.device(device)).dtype == torch.float64


def test_each_number_of_a_step_comes_back_under_its_name():
    room = totals_on(torch.device("cpu"))
    totals, power = room + torch.tensor([1, 2]), torch.tensor(3.0)
    votes = Votes()
    for name, answer in {"save": False, "stop": True, "third": 7}.items():
        votes.register(name, lambda step, answer=answer: answer)
    task = totals_on(torch.device("cpu"), TASK_ROOM)
    task[0], task[-1] = 0.5, -3.0
    without = StepStats.to_tensor(totals, power, 0.25, votes.cast(1))
    room_left = [0.0] * (VOTE_ROOM - 3)
    assert without.tolist() == [1.0, 2.0, 3.0, 0.25, 0.0, 1.0, 7.0, *room_left, *[0.0] * TASK_ROOM]
    summed = 2 * StepStats.to_tensor(totals, power, 0.25, votes.cast(1), task)
    assert summed.dtype == room.dtype
    assert len(summed) == StepStats.length(votes.names) == STEP_NUMBERS
    sums = StepStats.from_numbers(summed.tolist(), votes.names)
    assert sums[:4] == (2.0, 4.0, 6.0, 0.5)
    assert sums.votes == {"save": 0.0, "stop": 2.0, "third": 14.0}
    assert sums.task == (1.0, *[0.0] * (TASK_ROOM - 2), -6.0)


def test_more_votes_than_there_is_room_for_make_the_message_longer():
    votes, totals = Votes(), totals_on(torch.device("cpu"))
    names = [f"vote{number}" for number in range(VOTE_ROOM + 2)]
    for number, name in enumerate(names):
        votes.register(name, lambda step, number=number: step + number)
    votes.register(names[0], lambda step: -1)  # in the place of the first
    message = StepStats.to_tensor(totals, totals[0], 0.0, votes.cast(10))
    assert len(message) == StepStats.length(names) == STEP_NUMBERS + 2
    sums = StepStats.from_numbers(message.tolist(), votes.names)
    assert [*sums.votes] == names and sums.task == (0.0,) * TASK_ROOM
    assert [*sums.votes.values()] == [-1.0, *range(11, 10 + len(names))]


def told_late(extra: list[str]) -> list[bool]:
    """Whether each step says the same when it is read at once and after the next one."""
    rows = []
    for late in (False, True):
        run = parity.trainer([*BASE, *extra])
        issued, seen = [], []
        for step in range(1, 5):
            issued.append(run.train_step(step))
            assert isinstance(issued[-1].stats, OnHost)
            if not late:
                seen.append(issued[-1].wait())
        seen = seen or [x.wait() for x in issued]
        rows.append([(x.loss, x.grad_norm, x.tokens, x.lr, x.skipped) for x in seen])
        assert all(0 <= x.bubble < 1 and x.time_s > 0 for x in seen)
        run.close()
    return [a == b for a, b in zip(*rows, strict=True)]


def test_a_step_says_the_same_whenever_it_is_read(ranks):
    for told in ranks(2).run(told_late, ["parallel.pipe=2", "parallel.data=1"]):
        assert told == [True] * 4


class TimedByAStream:
    """What a device would say of a pass: computed in 3 of 4 s on rank 0, in 1 of 4 on rank 1."""

    def __init__(self, waits: list[str]):
        self.waits = waits

    def computed_s(self) -> float:
        self.waits.append("read")
        return 3.0 if dist.get_rank() == 0 else 1.0

    def elapsed_s(self) -> float:
        return 4.0


def bubble_of_a_device() -> tuple[float | None, list[str]]:
    run = parity.trainer([*BASE, "parallel.pipe=2", "parallel.data=1"])
    run.runs_ahead = True
    waits: list[str] = []
    run.executor.clock.timing = lambda: TimedByAStream(waits)  # type: ignore[assignment]
    issued = run.train_step(1)
    run.train_step(2)
    assert waits == [], "no step stops for what it measures"
    return issued.wait().bubble, waits


def test_the_bubble_of_a_device_is_summed_over_ranks_when_it_is_read(ranks):
    assert ranks(2).run(bubble_of_a_device) == [(0.5, ["read"])] * 2


def one_rank_times_the_stream(folder: str) -> tuple[list[float], list[float]]:
    """(time_s of every row, moments for which the host waited): a whole run on a stand-in stream
    on which a step takes 5 s, and 1 s passes between two steps."""
    from torchdistpackage.comm import moments
    from torchdistpackage.train import step as steps
    from torchdistpackage.train.build import make_loop
    from torchdistpackage.train.metric_rows import read_metrics
    from torchdistpackage.train.train_state import TrainState

    made = Stream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments, "cuda_event", made.event)
        patch.setattr(steps, "Period", lambda device: Period(CUDA))
        run = parity.trainer([*BASE, "checkpoint.save_every=0", "train.eval_every=0"])
        run.runs_ahead = True
        accumulate, inner = run.accumulate, run.train_step

        def slow(*args, **kwargs):
            made.now_s += 5
            return accumulate(*args, **kwargs)

        def step(number: int, **how):
            if number > 1:
                made.now_s += 1
            issued = inner(number, **how)
            assert max(made.waits, default=0) < made.now_s - 5, "the host waited for its own step"
            return issued

        run.accumulate, run.train_step = slow, step  # type: ignore[method-assign]
        make_loop(run, TrainState(), Path(folder)).run()
    return [row["time_s"] for row in read_metrics(Path(folder) / "metrics.jsonl")], made.waits


def test_time_s_of_a_run_is_that_of_the_stream(ranks, tmp_path):
    (found,) = ranks(1).run(one_rank_times_the_stream, str(tmp_path))
    times, _ = found
    assert times == pytest.approx([6, 6, 6, 5])


def matmul_precisions() -> list[str]:
    found = []
    for asked in (["precision.matmul=high"], ["precision.matmul=medium"], []):
        parity.trainer([*BASE, *asked]).close()
        found.append(torch.get_float32_matmul_precision())
    return found


def test_how_exact_products_of_float32_are_is_asked_for(ranks):
    assert ranks(1).run(matmul_precisions) == [["high", "medium", "highest"]]
