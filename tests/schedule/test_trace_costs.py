"""From the spans of a run: clocks, costs, and a bubble that is taken apart without a rest.

Runs are made here on paper, with known causes, each rank on a clock of its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from tests.tells import facts_pattern
from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Action, ActionKind, Schedule
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.engine import Span, busy, simulate
from torchdistpackage.schedule.generators import build
from torchdistpackage.schedule.resolve import from_csv
from torchdistpackage.schedule.trace_costs import (
    BubbleAttribution,
    aligned,
    attribute_bubble,
    costs_of,
)

NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]
CLOCKS_S = (0.0, 3.25, -1.5, 8.0)


def run(
    schedule: Schedule, costs: StageCosts, host_s: float = 0.0, clocks_s: Sequence[float] = CLOCKS_S
) -> list[list[Span]]:
    """What ranks record that take `costs`, and `host_s` more around each action's own time."""
    plus = [tuple(x + host_s for x in row) for row in (costs.forward, costs.backward, costs.input)]
    slow = StageCosts(*plus, tuple(x + host_s for x in costs.weight), costs.message)
    rows: list[list[Span]] = []
    for rank, row in enumerate(simulate(schedule, slow).spans):
        clock, now = clocks_s[rank], 0.0
        rows.append([])
        for action, start, end in row:
            if start > now:
                wait = ActionKind.RECV_F if action.kind is ActionKind.F else ActionKind.RECV_B
                rows[-1].append(Span(action._replace(kind=wait), now + clock, start + clock))
            rows[-1].append(Span(action, start + clock, end - host_s + clock))
            now = end
    return rows


def uneven(num_stages: int, message_s: float = 0.002) -> StageCosts:
    grown = [1 + 0.1 * (s % 3) for s in range(num_stages)]
    return StageCosts(
        tuple(0.010 * g for g in grown),
        tuple(0.020 * g for g in grown),
        tuple(0.012 * g for g in grown),
        tuple(0.008 * g for g in grown),
        (message_s,) * num_stages,
    )


def means(gap: BubbleAttribution) -> list[float]:
    parts = (gap.alone, gap.imbalance, gap.message_wait, gap.host)
    return [100 * sum(part) / len(part) for part in parts]


@pytest.mark.parametrize("name", NAMES)
def test_costs_come_back_from_a_run_whose_ranks_disagree_about_the_time(name: str):
    schedule = build(name, 4, 8)
    costs = uneven(schedule.num_stages)
    found = costs_of(run(schedule, costs), schedule.num_stages)
    place = schedule.placement
    for stage in range(schedule.num_stages):
        assert found.forward[stage] == pytest.approx(costs.forward[stage])
        if name in ("zb-h1", "zb-v", "dualpipe-v"):
            ran = {
                a.kind for row in schedule.programs for a in row if getattr(a, "stage", -1) == stage
            }
            for kind, row, taken in (
                (ActionKind.B, found.backward, costs.backward),
                (ActionKind.I, found.input, costs.input),
                (ActionKind.W, found.weight, costs.weight),
            ):
                if kind in ran:
                    assert row[stage] == pytest.approx(taken[stage])
        else:
            assert found.backward[stage] == pytest.approx(costs.backward[stage])
            assert found.input[stage] == found.weight[stage] == found.backward[stage] / 2
    for stage in range(schedule.num_stages - 1):
        far = place[stage] != place[stage + 1]
        assert found.message[stage] == pytest.approx(0.002 if far else 0.0, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_clocks_are_put_right_by_the_messages_alone(name: str):
    schedule = build(name, 4, 8)
    costs = uneven(schedule.num_stages)
    apart = aligned(run(schedule, costs))
    together = aligned(run(schedule, costs, clocks_s=(0.0,) * 4))
    for row, same in zip(apart, together, strict=True):
        assert [span.action for span in row] == [span.action for span in same]
        assert [t for s in row for t in s[1:]] == pytest.approx([t for s in same for t in s[1:]])
    assert min(span.start for row in apart for span in row) == 0.0


def test_messages_that_came_early_time_no_clock():
    """Rank 1 starts late and is the slower: no forward is waited for, each gradient is."""
    late_s, rows = 0.042, [[], []]
    for kind, stage, m, start_s, end_s in [
        (ActionKind.F, 0, 0, 0.0, 0.004), (ActionKind.F, 0, 1, 0.004, 0.008),
        (ActionKind.RECV_B, 0, 0, 0.008, 0.066), (ActionKind.B, 0, 0, 0.066, 0.074),
        (ActionKind.RECV_B, 0, 1, 0.074, 0.090), (ActionKind.B, 0, 1, 0.090, 0.098),
        (ActionKind.F, 1, 0, 0.042, 0.050), (ActionKind.B, 1, 0, 0.050, 0.066),
        (ActionKind.F, 1, 1, 0.066, 0.074), (ActionKind.B, 1, 1, 0.074, 0.090),
    ]:  # fmt: skip
        clock = late_s * stage
        rows[stage].append(Span(Action(stage, kind, m), start_s - clock, end_s - clock))
    assert rows[1][0].start == 0.0
    found = {span.action: span.start for row in aligned(rows) for span in row}
    assert found[Action(1, ActionKind.B, 0)] == pytest.approx(0.050)
    assert costs_of(rows, 2).message == (0.0, 0.0)


def test_a_clock_starts_with_the_first_computation():
    """A rank that was there early and waited is no part of the step's time."""
    rows = run(build("1f1b", 2, 3), uneven(2))
    early = rows[1][0]
    assert early.action.kind is ActionKind.RECV_F
    rows[1][0] = early._replace(start=early.start - 5.0)
    assert aligned(rows) == aligned(run(build("1f1b", 2, 3), uneven(2)))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_as_predicted_has_no_gap(name: str):
    schedule = build(name, 4, 8)
    equal = StageCosts.uniform(schedule.num_stages, 0.01, 0.012, 0.008)
    gap = attribute_bubble(schedule, run(schedule, equal))
    assert gap.measured.bubbles == pytest.approx(gap.predicted.bubbles)
    assert gap.measured.bubbles == pytest.approx(simulate(schedule, equal).bubbles)
    assert means(gap)[1:] == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cause", ["imbalance", "message wait", "host time"])
def test_each_cause_is_found_where_it_is(name: str, cause: str):
    schedule = build(name, 4, 8)
    costs = StageCosts.uniform(schedule.num_stages, 0.01, 0.012, 0.008)
    host_s = 0.0
    if cause == "imbalance":
        slower = [1 + 0.1 * rank for rank in schedule.placement]
        rows = (costs.forward, costs.backward, costs.input, costs.weight)
        grown = [tuple(x * y for x, y in zip(row, slower, strict=True)) for row in rows]
        costs = StageCosts(*grown, costs.message)
    elif cause == "message wait":
        costs = replace(costs, message=(0.004,) * schedule.num_stages)
    else:
        host_s = 0.001
    gap = attribute_bubble(schedule, run(schedule, costs, host_s))
    alone, *found = means(gap)
    wanted = ["imbalance", "message wait", "host time"].index(cause)
    # The mean of a rank's host time is spread over actions that recorded no end of it.
    assert found[wanted] > 1.0
    for i, other in enumerate(found):
        assert i == wanted or abs(other) < 0.4, (cause, found)
    assert alone + sum(found) == pytest.approx(100 * gap.measured.bubble)


@pytest.mark.parametrize("name", NAMES)
def test_the_reasons_sum_to_the_measured_bubble_on_every_rank(name: str):
    schedule = build(name, 4, 8)
    gap = attribute_bubble(schedule, run(schedule, uneven(schedule.num_stages), 0.0007))
    parts = zip(gap.alone, gap.imbalance, gap.host, gap.message_wait, strict=True)
    assert [sum(part) for part in parts] == pytest.approx(gap.measured.bubbles)


def test_the_gap_is_one_line_for_a_log():
    schedule = build("1f1b", 2, 4)
    line = str(
        attribute_bubble(schedule, run(schedule, StageCosts.uniform(2, 0.01, 0.01, 0.01, 0.005)))
    )
    assert line == (
        "1f1b: bubble 29.4% (by pipe rank 29.4% 29.4%), by its costs 29.4%; the schedule alone "
        "20.0%, imbalance +0.0, message wait +9.4, host time +0.0 points"
    )


def test_evaluation_has_costs_too():
    found = costs_of(run(build("forward", 3, 4), uneven(3), clocks_s=(0, 0, 0)), 3)
    assert found.forward == pytest.approx(uneven(3).forward)
    assert found.message[:2] == pytest.approx((0.002, 0.002))
    assert found.backward == (0.0, 0.0, 0.0)


def test_a_backward_that_never_ran_whole_is_the_sum_of_its_parts():
    split = from_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    found = costs_of(run(split, uneven(2)), 2)
    assert found.backward == pytest.approx(uneven(2).backward)


def test_spans_of_one_rank_are_not_enough():
    rows = run(build("1f1b", 2, 3), uneven(2))
    with pytest.raises(ScheduleError, match=facts_pattern("stage 1", "1 pipe")):
        costs_of(rows[:1], 2)


@pytest.mark.parametrize("name", NAMES)
def test_the_schedule_alone_is_that_of_stages_as_the_mean_of_them(name: str):
    """A whole backward is a mean of its own: it need not be the sum of its parts."""
    schedule = build(name, 4, 8)
    num = schedule.num_stages
    slower = [1 + 0.1 * s for s in range(num)]
    means_s = (0.010, 0.018, 0.012, 0.008)
    rows = [tuple(num * mean * x / sum(slower) for x in slower) for mean in means_s]
    spans = run(schedule, StageCosts(*rows, (0.0,) * num))
    gap, costs = attribute_bubble(schedule, spans), costs_of(spans, num, fmean)
    forward, backward, *parts = map(
        fmean, (costs.forward, costs.backward, costs.input, costs.weight)
    )
    equal = StageCosts.uniform(num, forward, *parts, backward=backward)
    assert gap.alone == pytest.approx(simulate(schedule, equal).bubbles)


def test_host_time_is_charged_to_the_rank_that_has_it():
    """But for what passed after its last action, a twelfth of it."""
    schedule, costs = build("1f1b", 2, 6), StageCosts.uniform(2, 0.01, 0.01, 0.01)
    for slow in range(2):
        longer = [0.002 * (rank == slow) for rank in range(2)]
        kinds = (costs.forward, costs.backward, costs.input, costs.weight)
        grown = [tuple(x + h for x, h in zip(row, longer, strict=True)) for row in kinds]
        hosted = StageCosts(*grown, costs.message)
        rows = [
            [s if s.action.kind.is_message else s._replace(end=s.end - longer[rank]) for s in row]
            for rank, row in enumerate(run(schedule, hosted))
        ]
        gap = attribute_bubble(schedule, rows)
        beyond = sum(gap.measured.bubbles) - sum(gap.alone)
        assert sum(gap.host) == pytest.approx(beyond, rel=1 / 12)


def test_the_prediction_computes_as_long_as_the_ranks_did():
    """So it is the mean of what actions took that counts, where one of them was slow."""
    schedule = build("zb-h1", 3, 5)
    rows = run(schedule, uneven(3))
    last = rows[2][-1]
    rows[2][-1] = last._replace(end=last.end + 0.05)
    gap = attribute_bubble(schedule, rows)
    assert [*map(busy, gap.predicted.spans)] == pytest.approx([*map(busy, rows)])
