"""A simulated schedule: when each action runs, if every action takes a known time.

`engine` says when; a Timeline is a view of that by actions. It is what is drawn and what a
measured step is compared with.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Action, ActionKind, Program, Schedule, flatten
from torchdistpackage.schedule.costs import Costs, StageCosts
from torchdistpackage.schedule.engine import WEIGHT, TaskGraph

DEFAULT_COSTS: Mapping[ActionKind, float] = {ActionKind.F: 1.0, ActionKind.B: 2.0}
"""A backward is two matrix products for each of the forward's one; messages are free."""

_LIVE = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.W: -1}


class Span(NamedTuple):
    """One action on the time axis, in the unit of the costs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When everything happened.

    spans: for each pipe index its actions in order of start. Simulated, these are the ones that
        compute; measured, the waits for messages are there too, under the message's kind.
    total: end of the last action.
    bubble: share of the ranks' time in which they computed nothing.
    peak_live: for each stage the most microbatches held at once: from the start of their F to
        the end of their B, or of their W where the backward is split. 0 without backwards.
    peak_live_of_rank: for each pipe index the same, counted over all its stages together.
    """

    name: str
    spans: tuple[tuple[Span, ...], ...]
    total: float
    bubble: float
    peak_live: tuple[int, ...]
    peak_live_of_rank: tuple[int, ...]

    @classmethod
    def of(cls, name: str, spans: Iterable[Iterable[Span]], num_stages: int) -> Self:
        """The timeline of these spans, one row for each pipe index, in order of start."""
        rows = tuple(map(tuple, spans))
        total = max((span.end for row in rows for span in row), default=0.0)
        bubble = 1 - sum(map(busy, rows)) / (len(rows) * total) if total else 0.0
        return cls(name, rows, total, bubble, *_peak_live(rows, num_stages))

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each pipe index its own `bubble`."""
        return tuple(1 - busy(row) / self.total if self.total else 0.0 for row in self.spans)


def busy(row: Iterable[Span]) -> float:
    """How long one rank computed."""
    return sum(span.end - span.start for span in row if not span.action.kind.is_message)


def simulate(schedule: Schedule, costs: Costs = DEFAULT_COSTS, steps: int = 1) -> Timeline:
    """Run `schedule` on paper.

    steps: so many back to back. A rank starts the next step when it has ended its own, not when all
        have; microbatch i of step k is written as i + k x num_microbatches.

    Raises:
        ScheduleError: a deadlock; the text lists what each rank waits for.
    """
    schedule = _repeated(schedule, steps)
    spans: list[list[Span]] = [[] for _ in schedule.programs]
    for span in replay(schedule, costs):
        spans[schedule.placement[span.action.stage]].append(span)
    return Timeline.of(schedule.name, spans, schedule.num_stages)


def replay(schedule: Schedule, costs: Costs = DEFAULT_COSTS) -> list[Span]:
    """All computations with their times, each after those it uses; raises as `simulate`.

    The messages of a program are passed over: when they travel follows from the computations.
    """
    stage_costs = StageCosts.of(costs, schedule.num_stages)
    work = TaskGraph(schedule.placement, schedule.num_microbatches, stage_costs)
    programs = tuple(map(_computations, schedule.programs))
    order = work.order(replace(schedule, programs=programs))
    order = [_up_to_early_weight(work, row) for row in order]
    log: list[tuple[int, int, float, float]] = []
    work.arrivals(order, log)
    if len(log) < sum(map(len, programs)):
        at = Counter(rank for rank, *_ in log)
        stuck = [r for r, program in enumerate(programs) if at[r] < len(program)]
        waiting = ", ".join(f"rank {r} at {programs[r][at[r]]}" for r in stuck)
        raise ScheduleError(
            f"{schedule.name}: deadlock; {waiting}: each uses what never comes or stands later in "
            f"the order; put it after the actions that it uses"
        )
    return [Span(programs[rank][place], start, end) for rank, place, start, end in log]


def _up_to_early_weight(work: TaskGraph, row: list[int]) -> list[int]:
    """What a rank can run before a W that stands before the first half of its backward."""
    size, gives, given = work.size, work.gives, set[int]()
    for place, number in enumerate(row):
        if number // size == WEIGHT and number - size not in given:
            return row[:place]
        given.add(gives[number])
    return row


def _computations(program: Program) -> tuple[Action, ...]:
    return tuple([action for action in flatten(program) if not action.kind.is_message])


def _repeated(schedule: Schedule, steps: int) -> Schedule:
    if steps < 1:
        raise ScheduleError(f"{schedule.name}: {steps} steps; simulate 1 or more")
    if steps == 1:
        return schedule
    m = schedule.num_microbatches
    programs = tuple(
        tuple(
            action._replace(microbatch=action.microbatch + step * m)
            for step in range(steps)
            for action in _computations(program)
        )
        for program in schedule.programs
    )
    return replace(schedule, num_microbatches=steps * m, programs=programs)


def _peak_live(
    rows: tuple[tuple[Span, ...], ...], num_stages: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    live, peak, peak_of_rank = [0] * num_stages, [0] * num_stages, [0] * len(rows)
    trains = any(span.action.kind.gives_gradient for row in rows for span in row)
    for rank, row in enumerate(rows if trains else ()):
        held = 0
        for (stage, kind, _), _, _ in row:
            change = _LIVE.get(kind, 0)
            live[stage] += change
            held += change
            peak[stage] = max(peak[stage], live[stage])
            peak_of_rank[rank] = max(peak_of_rank[rank], held)
    return tuple(peak), tuple(peak_of_rank)
