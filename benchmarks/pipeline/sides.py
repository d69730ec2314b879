"""Who is compared: runtimes and schedules, each on its own replica of the same stages.

A side is named as in the tables. `build` gives what one loop can time: a step and its modules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.pipeline.bars import CHECKED, FUNCTIONS, OURS, PEER
from benchmarks.pipeline.models import LOOP, TWO, VEE, Case, Stage
from torchdistpackage.comm.tensor_meta import Message
from torchdistpackage.compat.torchdistpackage.forward_backward import forward_backward
from torchdistpackage.parallel.pipeline.executor import Executor
from torchdistpackage.parallel.pipeline.partition.layer_costs import (
    PieceCost,
    split_measured,
    stage_costs,
)
from torchdistpackage.parallel.pipeline.pipeline import Pipeline
from torchdistpackage.schedule.generators import build

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Task:
    """What a side is built for. costs: of each piece, the loss counted with the last one.
    bytes_per_s: of the link."""

    case: Case
    num_microbatches: int
    costs: Sequence[PieceCost]
    bytes_per_s: float = inf

    def by_time(self, placement: Sequence[int], schedule: str) -> tuple[range, ...]:
        """Where the pieces are cut, when the time of `schedule` decides."""
        order = None if schedule == "auto" else build(schedule, 2, self.num_microbatches, 1)
        return split_measured(self.costs, placement, bytes_per_s=self.bytes_per_s, schedule=order)


@dataclass
class Running:
    """step: one, gradients added. stages: those of this rank, pieces under their numbers."""

    step: Callable[[], object]
    stages: list[nn.Module]

    def gradients(self) -> dict[str, Tensor]:
        named = (pair for stage in self.stages for pair in stage.named_parameters())
        return {name: p.grad for name, p in named if p.grad is not None}

    def zero(self) -> None:
        for stage in self.stages:
            stage.zero_grad()


@dataclass(frozen=True)
class Side:
    """build: (task, placement) -> Running. by_time: the schedule by whose measured time it is cut.
    yields: gloo's threads are as our comm leaves them, and not as torch does."""

    build: Callable[..., Running]
    placement: tuple[int, ...]
    by_time: str | None = None
    yields: bool = True

    def make(self, task: Task) -> Running:
        starts: list[int] = []
        if self.by_time is not None:
            cut = task.by_time(self.placement, self.by_time)
            starts = [pieces.start for pieces in cut[1:]]
        ranges = task.case.stages(self.placement, starts)
        return self.build(task, self.placement, ranges)


def own(task: Task, placement: Sequence[int], ranges: Sequence[range]) -> dict[int, nn.Module]:
    """This rank's stages by number."""
    rank, chain = dist.get_rank(), task.case.chain()
    return {
        s: Stage(chain, ranges[s]) if len(ranges[s]) > 1 else chain[ranges[s].start]
        for s, place in enumerate(placement)
        if place == rank
    }


def ours(
    task: Task,
    placement: Sequence[int],
    ranges: Sequence[range],
    *,
    schedule: str,
    check: bool = False,
) -> Running:
    """check: whether ranks compare what they bring before each step, which torch's do not."""
    stages, m = own(task, placement, ranges), task.num_microbatches
    costs = None
    if schedule == "auto":
        costs = stage_costs(task.costs, ranges, bytes_per_s=task.bytes_per_s)
    pipe = Pipeline(
        list(stages.values()),
        loss=task.case.loss,
        schedule=schedule,
        num_microbatches=m,
        chunks=len(placement) // 2,
        group=dist.group.WORLD,
        costs=costs,
        check=check,
    )
    x, y = task.case.draw(m)
    args = (x,) if 0 in stages else ()
    targets = y if len(placement) - 1 in stages else None
    return Running(lambda: pipe.step(*args, targets=targets), list(stages.values()))


def functions(task: Task, placement: Sequence[int], ranges: Sequence[range]) -> Running:
    """`forward_backward` with an optimizer, of one stage a rank."""
    ((s, stage),) = own(task, placement, ranges).items()
    x, y = task.case.draw(task.num_microbatches)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

    def with_loss(given: list) -> Tensor:
        *received, targets = given
        return task.case.loss(stage(*received), targets)

    fwd_fn, inputs = (with_loss, y) if s else (stage, x)
    options = {"num_microbatches": task.num_microbatches, "group": dist.group.WORLD}
    step = partial(forward_backward, optimizer, fwd_fn, None, inputs, **options)
    return Running(step, [stage])


def bare(
    task: Task, placement: Sequence[int], ranges: Sequence[range], *, schedule: str
) -> Running:
    """The executor without its front door, on microbatches that are cut already."""
    stages, m = own(task, placement, ranges), task.num_microbatches
    executor = Executor(build(schedule, 2, m, len(placement) // 2), dist.group.WORLD, device=CPU)
    xs, ys = (value.chunk(m) for value in task.case.draw(m))
    last = len(placement) - 1

    def forward(s: int, i: int, received: Message) -> Message:
        x = (xs[i],) if s == 0 else received if isinstance(received, tuple) else (received,)
        output = stages[s](*x)
        return task.case.loss(output, ys[i]) if s == last else output

    weights = [1 / m] * m
    return Running(lambda: executor.run(forward, weights=weights), list(stages.values()))


def torchs(
    task: Task, placement: Sequence[int], ranges: Sequence[range], *, schedule: Callable
) -> Running:
    stages, m = own(task, placement, ranges), task.num_microbatches
    made = [PipelineStage(stage, s, len(placement), CPU) for s, stage in stages.items()]
    given = made[0] if schedule is Schedule1F1B else made
    runtime = schedule(given, m, loss_fn=task.case.loss)
    x, y = task.case.draw(m)
    args = (x,) if 0 in stages else ()
    options = {"target": y} if len(placement) - 1 in stages else {}
    return Running(lambda: runtime.step(*args, **options), list(stages.values()))


def alone(task: Task, placement: Sequence[int], ranges: Sequence[range]) -> Running:
    """The same microbatches in one process, on both ranks at once."""
    chain, m = task.case.chain(), task.num_microbatches
    whole = Stage(chain, range(len(chain)))
    parts = [*zip(*(value.chunk(m) for value in task.case.draw(m)), strict=True)]

    def step() -> None:
        for x, y in parts:
            (task.case.loss(whole(x), y) / m).backward()

    return Running(step, [whole])


def messages(task: Task, placement: Sequence[int], ranges: Sequence[range]) -> Running:
    """What crosses the cut, to and fro, one after the other, and nothing else."""
    x = task.case.draw(task.num_microbatches)[0].chunk(task.num_microbatches)[0]
    with torch.no_grad():
        sent = Stage(task.case.chain(), ranges[0])(x)
    room, rank = torch.empty_like(sent), dist.get_rank()

    def step() -> None:
        for _ in range(task.num_microbatches):
            for what in (dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send):
                what(sent if what is dist.send else room, 1 - rank)

    return Running(step, [])


ALONE, MESSAGES = "one process", "bare messages"
_TORCHS = {
    PEER: Side(partial(torchs, schedule=Schedule1F1B), TWO),
    "torch Interleaved1F1B": Side(partial(torchs, schedule=ScheduleInterleaved1F1B), LOOP),
    "torch InterleavedZeroBubble": Side(
        partial(torchs, schedule=ScheduleInterleavedZeroBubble), LOOP
    ),
    "torch ZBVZeroBubble": Side(partial(torchs, schedule=ScheduleZBVZeroBubble), VEE),
}
SIDES = {
    ALONE: Side(alone, TWO),
    MESSAGES: Side(messages, TWO),
    **{name: replace(side, yields=False) for name, side in _TORCHS.items()},
    **{f"{name}{OURS}": side for name, side in _TORCHS.items()},
    "1f1b": Side(partial(ours, schedule="1f1b"), TWO),
    CHECKED: Side(partial(ours, schedule="1f1b", check=True), TWO),
    FUNCTIONS: Side(functions, TWO),
    "1f1b, executor": Side(partial(bare, schedule="1f1b"), TWO),
    "1f1b, cut by time": Side(partial(ours, schedule="1f1b"), TWO, by_time="1f1b"),
    "interleaved": Side(partial(ours, schedule="interleaved"), LOOP),
    "zb-h1": Side(partial(ours, schedule="zb-h1"), TWO),
    "zb-h1, cut by time": Side(partial(ours, schedule="zb-h1"), TWO, by_time="zb-h1"),
    "interleaved-zb": Side(partial(ours, schedule="interleaved-zb"), LOOP),
    "zb-v": Side(partial(ours, schedule="zb-v"), VEE),
    "auto, cut by time": Side(partial(ours, schedule="auto"), TWO, by_time="auto"),
}
