"""When a run ends and whether it comes back, as arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchdistpackage.config.schema import RequeueSection
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.requeue import (
    Decision,
    RequeueDecision,
    decide,
    decide_in_job,
    quantile,
    required_time_s,
    restart_denied_reason,
    time_is_up,
)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_a_value_that_the_part_asked_for_does_not_exceed(values, q):
    found = quantile(values, q)
    assert found in values
    assert sum(v <= found for v in values) >= q * len(values)
    assert all(
        sum(v <= other for v in values) < q * len(values) for other in values if other < found
    )


def test_nothing_measured_is_zero():
    assert quantile([]) == 0


# seconds left -> may the step that begins now be followed by another one? Steps of 10 s with one
# of 12, saves of 5 s, margin 30: 2 x 12 + 2 x 5 + 30 = 64
@pytest.mark.parametrize(
    ("left_s", "up"), [(65, False), (64.5, False), (64, True), (10, True), (-5, True)]
)
def test_the_last_safe_step_is_two_steps_two_saves_and_the_margin_before_the_end(left_s, up):
    why = time_is_up(1000, 1000 + left_s, [10] * 30 + [12], [5, 4], 30)
    assert bool(why) is up
    if up:
        assert f"ends in {left_s:.0f} s" in why and "64 s" in why and "margin of 30 s" in why


@given(
    step_s=st.floats(0.1, 100),
    save_s=st.floats(0, 100),
    margin_s=st.floats(0, 100),
    length_s=st.floats(1, 5000),
    save_every=st.integers(0, 20),
)
def test_a_run_that_heeds_it_has_saved_when_the_job_ends(
    step_s, save_s, margin_s, length_s, save_every
):
    """Played through, with periodic saves: the wish of one step ends the run after it."""
    if required_time_s([step_s], [save_s], margin_s) > length_s:
        return
    now, step = 0.0, 0
    while True:
        stop = time_is_up(now, length_s, [step_s], [save_s], margin_s)
        now += step_s
        step += 1
        if stop:
            break
        if save_every and step % save_every == 0:
            now += save_s
    assert now + save_s + margin_s <= length_s + 1e-6
    assert now + 2 * step_s + 3 * save_s + margin_s >= length_s - 1e-6, "and no step is given away"


def test_where_numbers_come_late_more_steps_are_kept_free():
    """On a device the wish is heard two steps later, and one step still runs when it is asked."""
    assert required_time_s([10], [5], 30, ahead=4) - required_time_s([10], [5], 30) == 20


def test_without_an_end_time_is_never_up():
    assert time_is_up(1e12, None, [10], [5], 30) == ""


def test_a_save_that_was_never_measured_is_taken_for_a_long_one():
    assert required_time_s([2], [], 0) == 4 + 2 * 20
    assert required_time_s([0.1], [], 0) == pytest.approx(0.2 + 2 * 10)
    assert required_time_s([], [], 30) == 50


@pytest.mark.parametrize(
    ("began_at", "now", "stuck"),
    [
        ([], 0, False),
        ([0], 0, False),
        ([0, 0], 0, True),
        ([0, 0], 5, False),
        ([5, 5], 5, True),
        ([0, 5], 5, False),
        ([0, 0, 5], 5, False),
        ([0, 5, 5], 5, True),
        ([5, 0], 0, False),  # the newest checkpoint was damaged: went back, then got nowhere once
    ],
)
def test_two_starts_in_a_row_without_a_step_are_enough(began_at, now, stuck):
    assert bool(restart_denied_reason(began_at, now, RequeueSection())) is stuck


def test_a_run_comes_back_as_often_as_it_may():
    limits = RequeueSection(max_requeues=3)
    words = [
        decide("USR1", list(range(0, 10 * starts, 10)), 10 * starts, limits).word
        for starts in range(1, 6)
    ]
    assert words == [RequeueDecision.REQUEUE] * 3 + [RequeueDecision.STOP] * 2
    last = decide("USR1", [0, 10, 20, 30], 40, limits)
    assert "max_requeues=3" in last.reason and "after step 40: USR1" in last.reason
    # Slurm's own requeues (node failures) count too: a start after the last one is refused
    assert restart_denied_reason([0, 10, 20, 30], 40, limits) and not restart_denied_reason(
        [0, 10, 20], 30, limits
    )
    assert decide("USR1", [0], 10, RequeueSection(max_requeues=0)).word is RequeueDecision.STOP


@pytest.mark.parametrize(
    ("mode", "word"),
    [
        ("requeue", RequeueDecision.REQUEUE),
        ("chain", RequeueDecision.CHAIN),
        ("never", RequeueDecision.STOP),
    ],
)
def test_how_a_run_comes_back_is_the_users_choice(mode, word):
    assert decide("time", [0], 7, RequeueSection(mode=mode)).word is word


def test_no_progress_stops_a_run_at_once_however_many_requeues_are_left():
    decision = decide("TERM", [4, 4], 4, RequeueSection(max_requeues=100))
    assert (
        decision.word is RequeueDecision.STOP
        and "two starts in a row ended at step 4" in decision.reason
    )


@pytest.mark.parametrize("word", list(RequeueDecision))
def test_a_decision_is_one_line_that_a_shell_can_read(word):
    decision = Decision(word, "after step 3:\n two  lines")
    line = str(decision)
    assert "\n" not in line and line.split(" ", 1)[0] == word.value
    assert Decision.parse(line + "\n") == Decision(word, "after step 3: two lines")


def test_an_unknown_word_is_refused_with_those_that_are_known():
    with pytest.raises(LaunchError, match=r"'later now'.*finished, requeue, chain, stop, again"):
        Decision.parse("later now")


KILLED = "after step 9: rank 2: killed by signal 9 (SIGKILL)"
BEFORE = Decision(RequeueDecision.AGAIN, KILLED)


@pytest.mark.parametrize(
    ("died", "before", "more", "word"),
    [
        (KILLED, None, {"starts_left": 1}, RequeueDecision.AGAIN),
        (
            KILLED,
            Decision(RequeueDecision.REQUEUE, KILLED),
            {"starts_left": 1},
            RequeueDecision.AGAIN,
        ),
        (KILLED.replace("9:", "8:"), BEFORE, {"starts_left": 1}, RequeueDecision.AGAIN),
        (KILLED.replace("rank 2", "rank 3"), BEFORE, {"starts_left": 1}, RequeueDecision.AGAIN),
        (KILLED, BEFORE, {"starts_left": 5}, RequeueDecision.STOP),
        (KILLED, None, {"starts_left": 0}, RequeueDecision.STOP),
        (KILLED, None, {"starts_left": 1, "time_up": "the job ends in 3 s"}, RequeueDecision.STOP),
        (KILLED, None, {"starts_left": 1, "bad_node": "killed by SIGBUS"}, RequeueDecision.STOP),
    ],
)
def test_ranks_start_anew_in_their_job_unless_that_is_in_vain(died, before, more, word):
    found = decide_in_job(died, before, **more)
    assert found.word is word and found.reason.startswith(died)
    assert all(str(value) in found.reason for key, value in more.items() if key != "starts_left")


def test_ranks_that_start_anew_in_their_job_use_up_no_requeue():
    limits = RequeueSection(max_requeues=1)
    assert not restart_denied_reason([0, 5], 12, limits, in_job=1)
    assert "1 requeues used up" in restart_denied_reason([0, 5], 12, limits)
    assert decide("USR1", [0, 5, 9], 12, limits, in_job=2).word is RequeueDecision.REQUEUE
    assert decide("USR1", [0, 12, 12], 12, limits, in_job=2).word is RequeueDecision.STOP, (
        "no progress"
    )
