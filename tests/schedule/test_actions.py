"""Schedules are text that reads back, and hold each stage where its placement says."""

import pytest

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import (
    Action,
    ActionKind,
    Batch,
    flatten,
    parse,
    parse_action,
)
from torchdistpackage.schedule.generators import GENERATORS, build


@pytest.mark.parametrize("name", GENERATORS)
def test_schedules_print_and_parse_back(name: str):
    schedule = build(name, 4, 5)
    assert parse(str(schedule)) == schedule


@pytest.mark.parametrize("kind", ActionKind)
def test_actions_print_as_they_are_spoken_and_parse_back(kind: ActionKind):
    assert str(Action(2, kind, 10)) == f"2{kind.value}10"
    assert parse_action(str(Action(2, kind, 10))) == Action(2, kind, 10)


@pytest.mark.parametrize(
    "text", ["nonsense", "1f1b stages=1 microbatches=1 placement=0\n0: 0X0", ""]
)
def test_text_that_is_no_schedule_is_refused(text: str):
    with pytest.raises(ScheduleError, match=r"is not the header of a schedule|is not an action"):
        parse(text)


def test_a_message_and_its_match_are_one():
    assert Action(2, ActionKind.SEND_F, 5).match == Action(3, ActionKind.RECV_F, 5)
    assert Action(2, ActionKind.SEND_B, 5).match == Action(1, ActionKind.RECV_B, 5)
    for kind in ActionKind:
        if kind.is_message:
            assert Action(2, kind, 5).match.match == Action(2, kind, 5)


def test_a_schedule_knows_the_stages_of_a_rank():
    schedule = build("zb-v", 3, 4)
    assert [schedule.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_a_batch_opens_in_order():
    batch = Batch((Action(1, ActionKind.RECV_F, 0), Action(1, ActionKind.SEND_B, 2)))
    assert str(batch) == "1RECV_F0+1SEND_B2"
    assert list(map(str, flatten((Action(0, ActionKind.F, 1), batch)))) == [
        "0F1", "1RECV_F0", "1SEND_B2",
    ]  # fmt: skip
