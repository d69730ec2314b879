"""Why the ranks of a measured step idle: the schedule itself, or one of three reasons beyond it.

The schedule is simulated with one more of what was measured at a time; a reason is what the bubble
grows by. Imbalance is what unequal stages add, host time what the gaps between a rank's actions
add on all ranks, message wait the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.timeline import Span, Timeline, busy, simulate
from torchdistpackage.schedule.trace_costs import Spans, aligned, costs_of


@dataclass(frozen=True, slots=True)
class BubbleAttribution:
    """A measured step beside its simulation; prints as one line of a log.

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
        reasons = ", ".join(
            f"{what} {100 * fmean(parts):+.1f}"
            for what, parts in (
                ("imbalance", self.imbalance),
                ("message wait", self.message_wait),
                ("host time", self.host),
            )
        )
        return (
            f"{self.measured.name}: bubble {self.measured.bubble:.1%} (by pipe rank {ranks}), "
            f"by its costs {self.predicted.bubble:.1%}; the schedule alone "
            f"{fmean(self.alone):.1%}, {reasons} points"
        )


def attribute_bubble(schedule: Schedule, spans: Spans) -> BubbleAttribution:
    """Compare one step of `schedule` with what it should have been.

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
        _grown(alone, uneven),
        _grown(uneven, with_host),
        _grown(with_host, measured.bubbles),
    )


def _host_s(row: Sequence[Span]) -> float:
    """What passed beside computing and waiting between a rank's first and last span, an action."""
    computations = sum(not span.action.kind.is_message for span in row)
    if not computations:
        return 0.0
    inside = max(span.end for span in row) - min(span.start for span in row)
    return max(0.0, inside - sum(span.end - span.start for span in row)) / computations


def _plus(costs: StageCosts, more: Sequence[float]) -> StageCosts:
    def longer(row: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(cost + extra for cost, extra in zip(row, more, strict=True))

    return StageCosts(
        longer(costs.forward),
        longer(costs.backward),
        longer(costs.input),
        longer(costs.weight),
        costs.message,
    )


def _equal(costs: StageCosts) -> StageCosts:
    """All stages as the mean of them."""
    return StageCosts.uniform(
        len(costs.forward),
        fmean(costs.forward),
        fmean(costs.input),
        fmean(costs.weight),
        backward=fmean(costs.backward),
    )


def _grown(before: Sequence[float], after: Sequence[float]) -> tuple[float, ...]:
    return tuple(b - a for a, b in zip(before, after, strict=True))
