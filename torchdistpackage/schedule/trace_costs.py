"""Spans of a run, read: clocks put right, the cost of each action, and why ranks idled.

Each rank times its own actions on its own clock. A message that was waited for was used when it
arrived, and the quickest such one each way took the same time: that gives both the difference of
two clocks and the time of a message.

A bubble is attributed by simulating the schedule with one more of what was measured at a time; a
reason is what the bubble grows by. Imbalance is what unequal stages add, host time what the gaps
between a rank's actions add on all ranks, message wait the rest.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import add, sub
from statistics import fmean, median
from typing import NamedTuple

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Action, ActionKind, Schedule
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.engine import Span, Timeline, busy, simulate

Spans = Sequence[Sequence[Span]]
"""For each pipe index the spans of one step, in seconds of that rank's clock."""

_SHORT = 0.02
"""A wait below this share of a computation is no wait: the message was there."""


def costs_of(
    spans: Spans, num_stages: int, average: Callable[[list[float]], float] = median
) -> StageCosts:
    """Seconds of the actions of each stage; what never ran follows from its parts.

    message: of the quickest between the two ranks, from the end of what sends it to the start of
    what uses it. Of a stage that ran only B, I and W are parts of it as on the other stages. Raises
    ScheduleError: a stage has no forward in the spans.
    """
    taken: defaultdict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    for row in spans:
        for action, start, end in row:
            taken[action.kind, action.stage].append(end - start)
    if absent := [s for s in range(num_stages) if not taken[ActionKind.F, s]]:
        raise ScheduleError(
            f"no forward of stage {', '.join(map(str, absent))} among the spans of {len(spans)} "
            f"pipe ranks; pass those of every rank, of a step with all {num_stages} stages"
        )

    zeros = (0.0,) * num_stages

    def by_stage(kind: ActionKind, default: Sequence[float] = zeros) -> tuple[float, ...]:
        found = [taken[kind, s] for s in range(num_stages)]
        return tuple(average(x) if x else y for x, y in zip(found, default, strict=True))

    first, second, full = by_stage(ActionKind.I), by_stage(ActionKind.W), by_stage(ActionKind.B)
    parts = sum(first) + sum(second)
    share = sum(first) / parts if parts else 0.5
    first = by_stage(ActionKind.I, [b * share for b in full])
    second = by_stage(ActionKind.W, [b * (1 - share) for b in full])
    full = by_stage(ActionKind.B, [i + w for i, w in zip(first, second, strict=True)])
    place = {span.action.stage: rank for rank, rows in enumerate(spans) for span in rows}
    quickest = _quickest(spans)
    message = [
        0.0 if place[s] == place[s + 1] else _link(quickest, place[s], place[s + 1])[0]
        for s in range(num_stages - 1)
    ]
    return StageCosts(by_stage(ActionKind.F), full, first, second, (*message, 0.0))


def aligned(spans: Spans) -> list[list[Span]]:
    """The spans on one clock, which starts with the first computation; waits before are cut off.

    Where the messages of one direction were all early, it is off by what one of the other takes.
    """
    quickest = _quickest(spans)
    shift, reached = {0: 0.0}, [0]
    for a in reached:  # which grows
        for b in range(len(spans)):
            if b not in shift and ((a, b) in quickest or (b, a) in quickest):
                shift[b] = shift[a] + _link(quickest, a, b)[1]
                reached.append(b)
    moved = [
        [Span(a, start - shift.get(r, 0.0), end - shift.get(r, 0.0)) for a, start, end in row]
        for r, row in enumerate(spans)
    ]
    zero = min((s.start for row in moved for s in row if not s.action.kind.is_message), default=0.0)
    return [
        [Span(a, max(0.0, start - zero), end - zero) for a, start, end in row if end > zero]
        for row in moved
    ]


class _Quickest(NamedTuple):
    """Times of the messages from one rank to another."""

    early: bool
    """Whether all were there before they were needed: then even the quickest took less."""
    time_s: float
    """Least from the end of what sent one, on that clock, to the start of its use, on the other."""


def _quickest(spans: Spans) -> dict[tuple[int, int], _Quickest]:
    """The quickest messages by (from, to)."""
    users: dict[Action, tuple[int, float]] = {}
    waits: dict[Action, float] = {}
    for rank, row in enumerate(spans):
        for action, start, end in row:
            if action.kind.is_message:
                waits[action] = end - start
            else:
                users[action.result] = (rank, start)
    computing = [end - start for row in spans for a, start, end in row if not a.kind.is_message]
    short = _SHORT * median(computing) if computing else 0.0
    found: dict[tuple[int, int], _Quickest] = {}
    for rank, row in enumerate(spans):
        for action, _, end in row:
            send = action.send
            if send is None:
                continue
            to, start = users.get(action.result._replace(stage=send.peer), (rank, 0.0))
            if to != rank:
                best = found.get((rank, to), _Quickest(True, math.inf))
                early = best.early and waits.get(send.match, 0.0) <= short
                found[rank, to] = _Quickest(early, min(best.time_s, start - end))
    return found


def _link(quickest: dict[tuple[int, int], _Quickest], a: int, b: int) -> tuple[float, float]:
    """Time of a message between two ranks, and how far the clock of `b` is ahead of that of `a`.

    With messages one way only, as in evaluation, the clocks are assumed to agree; if those of one
    way were all early, those of the other to have taken no time.
    """
    there, back = quickest.get((a, b)), quickest.get((b, a))
    if there is None or back is None:
        one = there or back
        return (0.0 if one is None else max(0.0, one.time_s)), 0.0
    if there.early != back.early:
        return 0.0, -back.time_s if there.early else there.time_s
    return max(0.0, (there.time_s + back.time_s) / 2), (there.time_s - back.time_s) / 2


@dataclass(frozen=True, slots=True)
class BubbleAttribution:
    """A measured step and its simulation; prints as one line of a log.

    measured, predicted: in seconds; predicted with the measured mean costs, messages included.
    alone: for each pipe index the bubble of the schedule with all stages equal, messages free.
    imbalance, host, message_wait: for each pipe index what each adds, as shares of the step;
        with `alone` they sum to the measured bubbles. Negative where a reason helps a rank.
    """

    measured: Timeline
    predicted: Timeline
    alone: tuple[float, ...]
    imbalance: tuple[float, ...]
    host: tuple[float, ...]
    message_wait: tuple[float, ...]

    def __str__(self) -> str:
        ranks = " ".join(f"{bubble:.1%}" for bubble in self.measured.bubbles)
        imbalance, wait, host = (
            100 * fmean(parts) for parts in (self.imbalance, self.message_wait, self.host)
        )
        return (
            f"{self.measured.name}: bubble {self.measured.bubble:.1%} (by pipe rank {ranks}), "
            f"by its costs {self.predicted.bubble:.1%}; the schedule alone "
            f"{fmean(self.alone):.1%}, imbalance {imbalance:+.1f}, message wait {wait:+.1f}, "
            f"host time {host:+.1f} points"
        )


def attribute_bubble(schedule: Schedule, spans: Spans) -> BubbleAttribution:
    """Compare one measured step of `schedule` with simulations of it.

    spans: of every pipe index, from `Executor.run(record=True)`: its computations and, under
        the kind of the message, its waits.

    Raises:
        ScheduleError: a stage of the schedule has no forward in the spans.
    """
    rows = aligned(spans)
    measured = Timeline.of(schedule.name, rows, schedule.num_stages)
    costs = costs_of(rows, schedule.num_stages, fmean)
    free = replace(costs, message=(0.0,) * schedule.num_stages)
    alone = simulate(schedule, _equal(free)).bubbles
    uneven = simulate(schedule, free).bubbles
    hosted = simulate(schedule, _plus(free, [_host_s(rows[r]) for r in schedule.placement])).total
    with_host = [1 - busy(row) / hosted if hosted else 0.0 for row in rows]
    return BubbleAttribution(
        measured,
        simulate(schedule, costs),
        alone,
        tuple(map(sub, uneven, alone)),
        tuple(map(sub, with_host, uneven)),
        tuple(map(sub, measured.bubbles, with_host)),
    )


def _host_s(row: Sequence[Span]) -> float:
    """Seconds an action besides computing and waiting, between a rank's first and last span."""
    computations = sum(not span.action.kind.is_message for span in row)
    if not computations:
        return 0.0
    inside = max(span.end for span in row) - min(span.start for span in row)
    return max(0.0, inside - sum(span.end - span.start for span in row)) / computations


def _plus(costs: StageCosts, more: Sequence[float]) -> StageCosts:
    computations = (costs.forward, costs.backward, costs.input, costs.weight)
    return StageCosts(*(tuple(map(add, row, more)) for row in computations), message=costs.message)


def _equal(costs: StageCosts) -> StageCosts:
    """All stages as the mean of them."""
    means = [fmean(row) for row in (costs.forward, costs.input, costs.weight)]
    return StageCosts.uniform(len(costs.forward), *means, backward=fmean(costs.backward))
