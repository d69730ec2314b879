"""A schedule that cannot run is refused, with what is wrong by name."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.tells import facts_pattern
from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Action, ActionKind, Batch, Schedule, flatten, parse
from torchdistpackage.schedule.generators import build
from torchdistpackage.schedule.passes import check, check_computations


def edited(schedule: Schedule, rank: int, edit: Callable[[list], object]) -> Schedule:
    program = list(schedule.programs[rank])
    edit(program)
    programs = list(schedule.programs)
    programs[rank] = tuple(program)
    return replace(schedule, programs=tuple(programs))


def swap(i: int, j: int) -> Callable[[list], None]:
    def edit(program: list) -> None:
        program[i], program[j] = program[j], program[i]

    return edit


def test_broken_schedules_are_refused_by_name():
    good = build("gpipe", 2, 2)
    assert list(flatten(good.programs[0]))[-1] == Action(0, ActionKind.B, 1)
    for broken, text in [
        (edited(good, 0, lambda p: p.pop()), "missing: 0B1"),
        (edited(good, 0, lambda p: p.append(p[-1])), "listed twice: 0B1"),
        (replace(good, programs=good.programs[::-1]), "on the wrong rank"),
        (edited(good, 0, lambda p: p.append(Action(2, ActionKind.F, 0))), "unexpected: 2F0"),
        (edited(good, 0, swap(0, -1)), "0B1 at step 0 but 0F1, which it uses, only at step"),
        (replace(good, placement=(0,)), "places 2 stages on"),
        (replace(good, placement=(0, 2)), "a pipe index from 0 to 1"),
    ]:
        with pytest.raises(ScheduleError, match=text):
            check(broken)


def one_rank(program: str, placement: str = "0", microbatches: int = 1) -> Schedule:
    stages = placement.count(",") + 1
    head = f"own stages={stages} microbatches={microbatches} placement={placement}"
    return parse(f"{head}\n0: {program}")


@pytest.mark.parametrize(
    "program",
    ["0F0 0B0", "0F0 0I0 0W0", "0F0 0F1 0I0 0B1 0W0", "0F0 0F1"],
)
def test_a_backward_is_whole_or_in_two_parts_microbatch_by_microbatch(program: str):
    schedule = one_rank(program, microbatches=2 if "0F1" in program else 1)
    check(schedule)
    check_computations(schedule)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("0F0 0I0", "missing: 0W0"),
        ("0F0 0W0", "unexpected: 0W0"),
        ("0F0 0B0 0W0", "missing: 0I0; unexpected: 0B0"),
        ("0F0 0I0 0W0 0W0", "listed twice: 0W0"),
        ("0F0 0B0 0I0 0W0", "unexpected: 0B0"),
        ("0F0 0W0 0I0", "0W0 at step 1 but 0I0, which it uses, only at step 2"),
        ("0I0 0F0 0W0", "0I0 at step 0 but 0F0, which it uses, only at step 1"),
        ("0B0 0F0", "0B0 at step 0 but 0F0"),
    ],
)
def test_parts_that_do_not_make_one_backward_are_refused(program: str, text: str):
    for refuse in (check, check_computations):
        with pytest.raises(ScheduleError, match=text):
            refuse(one_rank(program))


def test_stages_of_one_rank_hand_over_in_order_and_without_messages():
    check(one_rank("0F0 1F0 1I0 0B0 1W0", "0,0"))
    for program, text in [
        ("1F0 0F0 1B0 0B0", "1F0 at step 0 but 0F0, which it uses, only at step 1"),
        ("0F0 1F0 0B0 1B0", "0B0 at step 2 but 1B0, which it uses, only at step 3"),
        ("0F0 1F0 0B0 1I0 1W0", "0B0 at step 2 but 1I0, which it uses, only at step 3"),
        ("0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0", "unexpected: 0SEND_F0, 1RECV_F0"),
    ]:
        with pytest.raises(ScheduleError, match=text):
            check(one_rank(program, "0,0"))


def two_ranks(first: str, second: str, microbatches: int, placement: str = "0,1") -> Schedule:
    stages = placement.count(",") + 1
    head = f"own stages={stages} microbatches={microbatches} placement={placement}"
    return parse(f"{head}\n0: {first}\n1: {second}")


def test_a_message_is_sent_after_and_received_before_its_computation():
    for first, second, text in [
        ("0SEND_F0 0F0", "1RECV_F0 1F0", "0SEND_F0 at step 0 but 0F0"),
        ("0F0 0SEND_F0", "1F0 1RECV_F0", "1F0 at step 0 but 1RECV_F0"),
        ("0F0 0SEND_F0", "1F0", "missing: 1RECV_F0"),
    ]:
        with pytest.raises(ScheduleError, match=text):
            check(two_ranks(first, second, 1))
        check_computations(two_ranks("0F0", "1F0", 1))


@pytest.mark.parametrize("backward", ["1B0", "1I0"])
def test_a_gradient_is_sent_after_it_is_there(backward: str):
    rest = " 1W0" if backward == "1I0" else ""
    first = "0F0 0SEND_F0 0RECV_B0 0B0"
    check(two_ranks(first, f"1RECV_F0 1F0 {backward} 1SEND_B0{rest}", 1))
    with pytest.raises(ScheduleError, match=f"1SEND_B0 at step 2 but {backward}, which it uses"):
        check(two_ranks(first, f"1RECV_F0 1F0 1SEND_B0 {backward}{rest}", 1))


def test_messages_between_two_ranks_are_received_in_the_order_in_which_they_are_sent():
    """Both in one batch on each side, so nobody is stuck: the contents would be swapped."""
    first = "0F0 0F1 0SEND_F0+0SEND_F1"
    check(two_ranks(first, "1RECV_F0+1RECV_F1 1F0 1F1", 2))
    with pytest.raises(ScheduleError, match=facts_pattern("rank 0", "sends 0SEND_F0", "rank 1")):
        check(two_ranks(first, "1RECV_F1+1RECV_F0 1F0 1F1", 2))


def test_ranks_that_each_send_first_are_stuck_and_named():
    stuck = two_ranks(
        "0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1RECV_F1 1SEND_B0 1F1 1B1 1SEND_B1",
        2,
    )
    with pytest.raises(
        ScheduleError, match=facts_pattern("rank 0", "0RECV_B0 waits", "1SEND_B0", "rank 1")
    ):
        check(stuck)
    # the two that meet posted together: nothing is stuck
    check(edited(stuck, 0, lambda p: p.__setitem__(slice(3, 5), [Batch((p[3], p[4]))])))


def test_a_batch_is_done_only_when_all_of_it_is():
    """Rank 0 gets its first message but waits for the second, which needs what stands after."""
    with pytest.raises(
        ScheduleError, match=facts_pattern("rank 0", "0RECV_B0", "0RECV_B1 waits", "1SEND_B1")
    ):
        check(
            two_ranks(
                "0F0 0SEND_F0 0F1 0RECV_B0+0RECV_B1 0SEND_F1 0B0 0B1",
                "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
                2,
            )
        )
