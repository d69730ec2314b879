"""A schedule on paper: when each action runs, if every action takes a known time.

A rank computes in the order of its program, each action as soon as what it uses is there. A
message leaves when its action ends and arrives a known time later; it holds up neither rank, as
receives are posted ahead. The result, a Timeline, is what is drawn and what a measured step is
compared with.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Self

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Action, ActionKind, Program, Schedule, flatten
from torchdistpackage.schedule.costs import Costs, StageCosts

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
        """For each pipe index the share of `total` in which it computed nothing."""
        return tuple(1 - busy(row) / self.total if self.total else 0.0 for row in self.spans)


def busy(row: Iterable[Span]) -> float:
    """How long one rank computed."""
    return sum(span.end - span.start for span in row if not span.action.kind.is_message)


def simulate(schedule: Schedule, costs: Costs = DEFAULT_COSTS, steps: int = 1) -> Timeline:
    """Run `schedule` on paper; see Timeline for what comes out.

    steps: run it so many times back to back. A rank starts the next step when it has ended its
        own, not when all have; microbatch i of step k is written as i + k x num_microbatches.

    Raises:
        ScheduleError: no rank can move; the text lists what each one waits for.
    """
    schedule = _repeated(schedule, steps)
    spans: list[list[Span]] = [[] for _ in schedule.programs]
    for span in replay(schedule, costs):
        spans[schedule.placement[span.action.stage]].append(span)
    return Timeline.of(schedule.name, spans, schedule.num_stages)


def replay(schedule: Schedule, costs: Costs = DEFAULT_COSTS) -> list[Span]:
    """All computations with their times, listed so that each comes after those it uses.

    The messages of a program are passed over: when they travel follows from the computations.

    Raises:
        ScheduleError: as of `simulate`.
    """
    # A number for each of F, B or I, and W of a microbatch on a stage: three blocks of `block`,
    # so that what an action feeds on its own stage always stands one block further on.
    num_microbatches = schedule.num_microbatches
    block = schedule.num_stages * num_microbatches
    missing = [1 if i >= num_microbatches else 0 for i in range(block)]
    missing += [2 if i < block - num_microbatches else 1 for i in range(block)]
    missing += [1] * block
    ready = [0.0] * (3 * block)
    parked: dict[int, int] = {}
    rows = _rows(schedule, StageCosts.of(costs, schedule.num_stages), block)
    programs = [_computations(program) for program in schedule.programs]
    at, clock = [0] * len(programs), [0.0] * len(programs)
    spans: list[Span] = []
    runnable = list(range(len(programs)))[::-1]
    while runnable:
        rank = runnable.pop()
        program, now = programs[rank], clock[rank]
        for place in range(at[rank], len(program)):
            action = program[place]
            stage, kind, microbatch = action
            base, cost, onward, lag = rows[kind][stage]
            number = base + microbatch
            if missing[number] > 0:
                parked[number] = rank
                at[rank], clock[rank] = place, now
                break
            start = max(now, ready[number])
            now = start + cost
            spans.append(Span(action, start, now))
            if kind is not ActionKind.W:
                missing[number + block] -= 1
            if onward:
                fed = number + onward
                missing[fed] -= 1
                ready[fed] = now + lag
                if fed in parked and missing[fed] <= 0:
                    runnable.append(parked.pop(fed))
        else:
            at[rank] = len(program)
    stuck = [r for r, program in enumerate(programs) if at[r] < len(program)]
    if stuck:
        waiting = ", ".join(f"rank {r} at {programs[r][at[r]]}" for r in stuck)
        raise ScheduleError(
            f"{schedule.name}: nobody can move; {waiting}: each uses what never comes or stands "
            f"later in the order; put it after the actions that it uses"
        )
    return spans


_Row = tuple[int, float, int, float]


def _rows(schedule: Schedule, costs: StageCosts, block: int) -> dict[ActionKind, list[_Row]]:
    """By kind and stage: number of microbatch 0, cost, steps to the number fed, and its lag.

    0 steps: no other stage waits for it.
    """
    num_stages, size, place = schedule.num_stages, schedule.num_microbatches, schedule.placement
    near = (a == b for a, b in pairwise(place))
    lags = [0.0 if same else lag for same, lag in zip(near, costs.message, strict=False)]
    up = [*([size] * (num_stages - 1)), 0]
    down = [0, *([-size] * (num_stages - 1))]

    def table(first: int, cost: Sequence[float], onward: list[int], lag: list[float]) -> list[_Row]:
        return [(first + s * size, cost[s], onward[s], lag[s]) for s in range(num_stages)]

    none = [0] * num_stages
    return {
        ActionKind.F: table(0, costs.forward, up, [*lags, 0.0]),
        ActionKind.B: table(block, costs.backward, down, [0.0, *lags]),
        ActionKind.I: table(block, costs.input, down, [0.0, *lags]),
        ActionKind.W: table(2 * block, costs.weight, none, [0.0] * num_stages),
    }


def _computations(program: Program) -> list[Action]:
    return [action for action in flatten(program) if not action.kind.is_message]


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
    live, peak = [0] * num_stages, [0] * num_stages
    peak_of_rank = [0] * len(rows)
    if not any(span.action.kind.gives_gradient for row in rows for span in row):
        return tuple(peak), tuple(peak_of_rank)
    for rank, row in enumerate(rows):
        held = 0
        for (stage, kind, _), _, _ in row:
            change = _LIVE.get(kind, 0)
            live[stage] += change
            held += change
            peak[stage] = max(peak[stage], live[stage])
            peak_of_rank[rank] = max(peak_of_rank[rank], held)
    return tuple(peak), tuple(peak_of_rank)
