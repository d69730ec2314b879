"""Every generator, over every size: complete, safe without buffers, and as fast as its formula."""

import functools
import itertools
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule import draw
from torchdistpackage.schedule.actions import Action, Batch, Kind, Schedule, flatten, parse, to_csv
from torchdistpackage.schedule.check import check
from torchdistpackage.schedule.generate import GENERATORS, build
from torchdistpackage.schedule.passes import add_messages, fuse_messages
from torchdistpackage.schedule.simulate import simulate

SIZES = list(itertools.product(range(1, 9), range(1, 33)))


@functools.cache
def built(name: str, p: int, m: int) -> Schedule:
    return build(name, p, m)


def compute_only(name: str, p: int, m: int) -> Schedule:
    return Schedule(name, p, m, tuple(range(p)), GENERATORS[name](p, m))


def test_the_order_of_1f1b_is_the_table_everybody_draws():
    orders = [" ".join(map(str, program)) for program in compute_only("1f1b", 3, 4).programs]
    assert orders == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_the_formula(name: str):
    for p, m in SIZES:
        # the formula holds whatever the two cost: a dear backward here, a dear forward there
        for costs in ({Kind.F: 1.0, Kind.B: 2.0},) if m % 2 else ({Kind.F: 3.0, Kind.B: 1.0},):
            timeline = simulate(built(name, p, m), costs)
            assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12), (p, m)


def test_live_microbatches_of_1f1b_do_not_grow_with_their_number():
    for p, m in SIZES:
        assert simulate(built("1f1b", p, m)).peak_live == tuple(min(m, p - s) for s in range(p))
        assert simulate(built("gpipe", p, m)).peak_live == (m,) * p


def test_single_messages_get_1f1b_stuck_and_fusing_clears_it():
    for p, m in itertools.product(range(2, 9), range(2, 17)):
        single = add_messages(compute_only("1f1b", p, m))
        with pytest.raises(ScheduleError, match="stuck when messages are not buffered"):
            check(single)
        check(fuse_messages(single))


def test_the_steady_state_of_1f1b_is_one_exchange_a_turn():
    middle = build("1f1b", 4, 8).programs[1]
    batches = [step for step in middle if isinstance(step, Batch)]
    kinds = {frozenset(a.kind for a in batch.actions) for batch in batches}
    assert frozenset({Kind.SEND_F, Kind.RECV_B}) in kinds
    assert all(
        [a.kind.is_send for a in batch.actions] == sorted(a.kind.is_send for a in batch.actions)
        for batch in batches
    )


@pytest.mark.parametrize("name", GENERATORS)
def test_schedules_print_and_parse_back(name: str):
    schedule = build(name, 4, 5)
    assert parse(str(schedule)) == schedule
    assert to_csv(schedule).count("\n") == 3


def swap(schedule: Schedule, rank: int, i: int, j: int) -> Schedule:
    program = list(schedule.programs[rank])
    program[i], program[j] = program[j], program[i]
    programs = list(schedule.programs)
    programs[rank] = tuple(program)
    return replace(schedule, programs=tuple(programs))


def test_broken_schedules_are_refused_by_name():
    good = build("gpipe", 2, 2)
    dropped = replace(good, programs=(good.programs[0][:-1], good.programs[1]))
    doubled = replace(good, programs=((*good.programs[0], Action(0, Kind.B, 1)), good.programs[1]))
    moved = replace(good, programs=good.programs[::-1])
    first = list(flatten(good.programs[0]))
    backward = len(first) - 1
    assert first[backward].kind is Kind.B
    for broken, text in [
        (dropped, "missing: 0B1"),
        (doubled, "listed twice: 0B1"),
        (moved, "on the wrong rank"),
        (swap(good, 0, 0, len(good.programs[0]) - 1), "which it uses, only at step"),
    ]:
        with pytest.raises(ScheduleError, match=text):
            check(broken)


@pytest.mark.parametrize("text", ["nonsense", "1f1b stages=1 microbatches=1 placement=0\n0: 0X0"])
def test_text_that_is_no_schedule_is_refused(text: str):
    with pytest.raises(ScheduleError, match=r"is no schedule header|is not an action"):
        parse(text)


def test_an_unknown_name_is_answered_with_the_names():
    with pytest.raises(
        ScheduleError, match="no schedule 'pipedream'; the names are forward, gpipe"
    ):
        build("pipedream", 2, 2)
    with pytest.raises(ScheduleError, match="0 microbatches; use 1 or more of each"):
        build("1f1b", 2, 0)


@pytest.mark.parametrize("name", GENERATORS)
def test_the_svg_has_one_box_an_action_where_the_timeline_has_it(name: str):
    timeline = simulate(build(name, 3, 5))
    root = ET.fromstring(draw.svg(timeline))
    boxes = {
        box.get("data-action"): tuple(float(box.get(key, "nan")) for key in ("x", "y", "width"))
        for box in root.iter("{http://www.w3.org/2000/svg}rect")
    }
    expected = {
        str(span.action): (
            draw.LEFT_PX + span.start * draw.UNIT_PX,
            draw.TOP_PX + index * draw.ROW_PX,
            (span.end - span.start) * draw.UNIT_PX,
        )
        for index, row in enumerate(timeline.spans)
        for span in row
        if not span.action.kind.is_message
    }
    assert len(expected) == 3 * 5 * (1 if name == "forward" else 2)
    assert boxes == expected


def test_the_table_shows_each_tick():
    rows = draw.table(simulate(build("1f1b", 2, 2))).splitlines()
    assert rows == [
        "  0 | F0 F1 .. .. B0 -- .. B1 --",
        "  1 | .. F0 B0 -- F1 B1 -- .. ..",
    ]
