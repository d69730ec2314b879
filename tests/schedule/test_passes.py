"""Messages are placed where nobody can get stuck, and posted together where they meet."""

import itertools
from dataclasses import replace

import pytest

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Action, ActionKind, Batch, Schedule, Step, flatten
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.engine import simulate
from torchdistpackage.schedule.generators import GENERATORS, build
from torchdistpackage.schedule.passes import add_messages, check, fuse_messages, receives_ahead


def computations(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    return tuple(
        tuple(a for a in flatten(program) if not a.kind.is_message) for program in schedule.programs
    )


def naive_messages(schedule: Schedule) -> Schedule:
    """Each receive right before its use, each send right after its action."""
    last = schedule.num_stages - 1

    def around(a: Action) -> list[Step]:
        forward = a.kind is ActionKind.F
        source, target = (a.stage - 1, a.stage + 1) if forward else (a.stage + 1, a.stage - 1)
        receive, send = (
            (ActionKind.RECV_F, ActionKind.SEND_F)
            if forward
            else (ActionKind.RECV_B, ActionKind.SEND_B)
        )
        before = [Action(a.stage, receive, a.microbatch)] if 0 <= source <= last else []
        after = [Action(a.stage, send, a.microbatch)] if 0 <= target <= last else []
        return [*before, a, *after]

    programs = [[step for a in row for step in around(a)] for row in computations(schedule)]
    return replace(schedule, programs=tuple(map(tuple, programs)))


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.full)])
def test_messages_at_their_computations_get_1f1b_stuck_and_fusing_clears_it(every: int):
    for p, m in list(itertools.product(range(2, 9), range(2, 17)))[::every]:
        single = naive_messages(build("1f1b", p, m))
        with pytest.raises(ScheduleError, match="stuck when messages are not buffered"):
            check(single)
        check(fuse_messages(single))


@pytest.mark.parametrize("name", GENERATORS)
def test_messages_of_one_global_order_are_safe_even_one_by_one(name: str):
    for p, m in ((2, 2), (3, 7), (8, 4)):
        built = build(name, p, m)
        single = add_messages(built)
        check(single)
        assert not any(isinstance(step, Batch) for row in single.programs for step in row)
        assert computations(single) == computations(built)


@pytest.mark.parametrize("name", GENERATORS)
def test_any_costs_place_them_safely(name: str):
    """Unequal ones, none at all, and forwards that take no time."""
    built = build(name, 3, 5)
    stages = built.num_stages
    for costs in (
        StageCosts(*(tuple(1 + (i * 7 + s * 3) % 5 for s in range(stages)) for i in range(5))),
        StageCosts.uniform(stages, 0, 0, 0),
        StageCosts.uniform(stages, 0, 1, 2),
        StageCosts.uniform(stages, 1, 0, 0, 3),
    ):
        for placed in (add_messages(built, costs), fuse_messages(add_messages(built, costs))):
            check(placed)
            assert computations(placed) == computations(built)


def test_the_steady_state_of_1f1b_is_one_exchange_a_turn():
    middle = build("1f1b", 4, 8).programs[1]
    batches = [step for step in middle if isinstance(step, Batch)]
    kinds = {frozenset(a.kind for a in batch.actions) for batch in batches}
    assert frozenset({ActionKind.SEND_F, ActionKind.RECV_B}) in kinds
    assert frozenset({ActionKind.SEND_B, ActionKind.RECV_F}) in kinds
    steps = [str(step) for step in middle]
    steady = steps[steps.index("1B0") : steps.index("1B4") + 1]
    assert [step for step in steady if "+" not in step] == [
        "1B0", "1SEND_B0", "1F3", "1B1", "1F4", "1B2", "1F5", "1B3", "1F6", "1B4",
    ]  # fmt: skip


@pytest.mark.parametrize("name", GENERATORS)
def test_no_two_messages_stand_side_by_side_unfused_and_receives_come_first(name: str):
    for program in build(name, 4, 6).programs:
        runs = [
            list(group) for message, group in itertools.groupby(program, _is_message) if message
        ]
        assert all(len(run) == 1 for run in runs)
        for (step,) in runs:
            sends = [a.kind.is_send for a in flatten((step,))]
            assert sends == sorted(sends)


def _is_message(step: Step) -> bool:
    return isinstance(step, Batch) or step.kind.is_message


def test_stages_on_one_rank_get_no_message():
    turn = [step for step in flatten(build("zb-v", 2, 3).programs[1]) if _is_message(step)]
    assert {a.stage for a in turn if a.kind in (ActionKind.SEND_F, ActionKind.RECV_B)} == {2}
    assert {a.stage for a in turn if a.kind in (ActionKind.RECV_F, ActionKind.SEND_B)} == {1}
    assert not any(map(_is_message, flatten(build("interleaved", 1, 3, 4).programs[0])))


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("ahead", [0, 1, 3, 1000])
def test_receives_ahead_keep_their_order_and_move_nothing_else(name: str, ahead: int):
    built = build(name, 3, 5)
    moved = receives_ahead(built, ahead)
    assert computations(moved) == computations(built)
    for before, after in zip(built.programs, moved.programs, strict=True):
        for receives in (True, False):
            assert _gaps(after, receives) == [
                (max(0, gap - ahead) if receives else gap, action)
                for gap, action in _gaps(before, receives)
            ]
    assert simulate(moved) == simulate(built)
    if ahead == 0:
        assert moved == built


def _gaps(program: tuple[Step, ...], receives: bool) -> list[tuple[int, Action]]:
    """(computations before it, message) of all sends or all receives."""
    gap, found = 0, []
    for action in flatten(program):
        if not action.kind.is_message:
            gap += 1
        elif action.kind.is_send is not receives:
            found.append((gap, action))
    return found


def test_receives_cannot_be_posted_behind():
    with pytest.raises(ValueError, match="0 or more computations ahead, not -1"):
        receives_ahead(build("1f1b", 2, 2), -1)
