"""A schedule on paper: what takes how long, who holds what, and that no rank is forgotten."""

import itertools
import time
from dataclasses import replace

import pytest

from tests.tells import facts_pattern
from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Action, ActionKind, Schedule, parse_action
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.engine import Span, Timeline, replay, simulate
from torchdistpackage.schedule.generators import GENERATORS, build

SIZES = list(itertools.product((1, 2, 5, 8), (1, 2, 7, 16)))
ALL_SIZES = list(itertools.product(range(1, 9), range(1, 33)))


def order(text: str, placement: tuple[int, ...], num_microbatches: int) -> Schedule:
    programs = tuple(tuple(map(parse_action, line.split())) for line in text.strip().splitlines())
    return Schedule("own", len(placement), num_microbatches, placement, programs)


def ends(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(s.action): (s.start, s.end) for row in timeline.spans for s in row}


@pytest.mark.parametrize("sizes", [SIZES, pytest.param(ALL_SIZES, marks=pytest.mark.full)], ids=len)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_the_formula(name: str, sizes: list[tuple[int, int]]):
    for p, m in sizes:
        # the formula holds whatever the two cost: a dear backward here, a dear forward there
        costs = (
            {ActionKind.F: 1.0, ActionKind.B: 2.0}
            if m % 2
            else {ActionKind.F: 3.0, ActionKind.B: 1.0}
        )
        timeline = simulate(build(name, p, m), costs)
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12), (p, m)
        live = tuple(min(m, p - s) if name == "1f1b" else m for s in range(p))
        assert timeline.peak_live == timeline.peak_live_of_rank == live, (p, m)


def test_each_action_takes_what_its_stage_costs_and_a_message_its_time_between_ranks():
    """Worked by hand: stages 0 and 3 on rank 0, 1 and 2 on rank 1, so one pair hands over free."""
    schedule = order("0F0 3F0 3I0 0I0 3W0 0W0\n1F0 2F0 2B0 1B0", (0, 1, 1, 0), 1)
    costs = StageCosts((1, 2, 3, 4), (9, 5, 6, 9), (2, 9, 9, 1), (3, 9, 9, 2), (0.5, 7, 0.25, 7))
    timeline = simulate(schedule, costs)
    assert ends(timeline) == {
        "0F0": (0, 1),
        "1F0": (1.5, 3.5),
        "2F0": (3.5, 6.5),
        "3F0": (6.75, 10.75),
        "3I0": (10.75, 11.75),
        "2B0": (12, 18),
        "1B0": (18, 23),
        "0I0": (23.5, 25.5),
        "3W0": (25.5, 27.5),
        "0W0": (27.5, 30.5),
    }
    assert timeline.total == 30.5
    assert timeline.bubbles == pytest.approx((1 - 13 / 30.5, 1 - 16 / 30.5))
    assert timeline.bubble == pytest.approx(1 - 29 / 61)
    assert timeline.peak_live == (1, 1, 1, 1)
    assert timeline.peak_live_of_rank == (2, 2)


@pytest.mark.parametrize("m", [1, 4, 32])
def test_a_message_holds_up_neither_end(m: int):
    """Only the first one down and the last one back are waited for, however many there are."""
    slow = simulate(
        build("gpipe", 4, m), {ActionKind.F: 1.0, ActionKind.B: 2.0, ActionKind.SEND_F: 0.5}
    )
    assert slow.total == simulate(build("gpipe", 4, m)).total + 2 * 3 * 0.5


def test_what_a_split_backward_holds_is_held_until_its_weights():
    held = order("0F0 0F1 0I0 0I1 0F2 0W0 0W1 0I2 0W2", (0,), 3)
    assert simulate(held).peak_live == (3,)
    whole = order("0F0 0F1 0B0 0B1 0F2 0B2", (0,), 3)
    assert simulate(whole).peak_live == (2,)
    assert simulate(build("forward", 2, 3)).peak_live == (0, 0)


def test_kinds_cost_the_same_on_every_stage_and_halves_make_a_whole():
    assert StageCosts.of({ActionKind.F: 1.0, ActionKind.B: 3.0}, 2) == StageCosts.uniform(
        2, 1, 1.5, 1.5
    )
    assert StageCosts.of({ActionKind.I: 2.0, ActionKind.W: 1.0}, 2) == StageCosts.uniform(
        2, 0, 2, 1
    )
    with pytest.raises(ScheduleError, match="costs of 3 stages cannot time a schedule of 2"):
        simulate(build("1f1b", 2, 2), StageCosts.uniform(3))
    with pytest.raises(ScheduleError, match="a cost is -1"):
        StageCosts.uniform(2, forward=-1)
    with pytest.raises(ScheduleError, match="rows of costs"):
        replace(StageCosts.uniform(2), weight=(1.0,))


@pytest.mark.parametrize("name", GENERATORS)
def test_two_steps_run_back_to_back_without_a_barrier(name: str):
    schedule = build(name, 4, 8)
    one, two = simulate(schedule), simulate(schedule, steps=2)
    for first, both in zip(one.spans, two.spans, strict=True):
        assert both[: len(first)] == first
        second = [span.action for span in both[len(first) :]]
        assert second == [a._replace(microbatch=a.microbatch + 8) for a, _, _ in first]
        assert both[len(first)].start >= first[-1].end
    assert one.total < two.total <= 2 * one.total


def test_zb_h2_gains_only_from_the_second_step_on():
    """It ends staggered, so the next step starts on the first rank while the last one computes."""
    h1, h2 = build("zb-h1", 4, 8), build("zb-h2", 4, 8)
    assert simulate(h2).total == simulate(h1).total
    assert simulate(h2, steps=2).total < simulate(h1, steps=2).total
    assert simulate(h2, steps=2).bubble < simulate(h1, steps=2).bubble


def test_steps_below_one_are_refused():
    with pytest.raises(ScheduleError, match="0 steps; simulate 1 or more"):
        simulate(build("1f1b", 2, 2), steps=0)


@pytest.mark.parametrize("name", GENERATORS)
def test_replay_lists_everything_after_what_it_uses(name: str):
    schedule = build(name, 3, 4)
    spans = replay(schedule)
    at = {span.action: i for i, span in enumerate(spans)}
    assert len(at) == len(spans)
    for (stage, kind, m), i in at.items():
        if kind is ActionKind.F and stage:
            assert at[Action(stage - 1, ActionKind.F, m)] < i
        if kind.gives_gradient:
            assert at[Action(stage, ActionKind.F, m)] < i
            above = [at.get(Action(stage + 1, k, m), -1) for k in (ActionKind.B, ActionKind.I)]
            assert max(above) < i
        if kind is ActionKind.W:
            assert at[Action(stage, ActionKind.I, m)] < i


def test_ranks_that_wait_for_each_other_are_named_with_what_they_wait_at():
    crossed = order("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", (0, 1), 2)
    with pytest.raises(ScheduleError, match=facts_pattern("rank 0", "0B0", "rank 1", "1F1")):
        simulate(crossed)
    for early in ("0W0 0F0 0I0", "0B0 0F0", "0I0 0F0 0W0"):
        with pytest.raises(ScheduleError, match="deadlock; rank 0 at"):
            simulate(order(early, (0,), 1))


def test_a_timeline_of_measured_spans_counts_waits_as_idle():
    rows = [
        [Span(Action(0, ActionKind.F, 0), 0, 1), Span(Action(0, ActionKind.RECV_B, 0), 1, 5),
         Span(Action(0, ActionKind.B, 0), 5, 8)],
        [Span(Action(1, ActionKind.RECV_F, 0), 0, 1), Span(Action(1, ActionKind.F, 0), 1, 2),
         Span(Action(1, ActionKind.B, 0), 2, 5)],
    ]  # fmt: skip
    timeline = Timeline.of("run", rows, 2)
    assert (timeline.total, timeline.bubbles) == (8, (0.5, 0.5))
    assert timeline.peak_live == (1, 1)


def test_a_large_schedule_takes_milliseconds():
    """What synthesis calls by the hundred: 6144 computations, here in less than 15 ms of one core.

    Four times that is let pass, as other tests run beside it.
    """
    schedule = build("interleaved", 16, 64)
    taken_s: list[float] = []
    for _ in range(5):
        start = time.process_time()
        simulate(schedule)
        taken_s.append(time.process_time() - start)
    assert min(taken_s) < 0.06
