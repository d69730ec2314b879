"""When a dead job is submitted again: stories, told with a clock that nobody waits for."""

import pytest

from torchdistpackage.launch.slurm.monitor import (
    Attempt,
    Resubmit,
    ResubmitLimits,
    Stop,
    Wait,
    back_off_s,
    next_step,
)
from torchdistpackage.launch.slurm.query import OUTCOMES, JobInfo, Outcome
from torchdistpackage.launch.slurm.requeue import Decision, RequeueDecision

LIMITS = ResubmitLimits()
NOW_S = 10_000.0


def dead(state: str = "FAILED", *, steps: int | None = None, lived_s: float = 5.0) -> Attempt:
    return Attempt("7", NOW_S, NOW_S, state, lived_s, steps)


def step_for(
    *history: Attempt, now_s: float = NOW_S, limits: ResubmitLimits = LIMITS, state: str = ""
):
    return next_step(history, JobInfo("7", state or history[-1].state), now_s, limits)


@pytest.mark.parametrize("state", [s for s, fate in OUTCOMES.items() if fate is Outcome.ALIVE])
def test_a_living_job_is_left_alone(state: str):
    """The earlier monitor cancelled whatever was neither RUNNING nor PENDING."""
    assert step_for(Attempt("7", 0.0), state=state) == Wait(LIMITS.query_s)


def test_an_end_that_somebody_wished_for_is_final():
    assert step_for(dead("COMPLETED")) == Stop(Outcome.SUCCEEDED, "job 7 is COMPLETED")
    info = JobInfo("7", "CANCELLED", by="1000")
    stop = next_step([dead("CANCELLED")], info, NOW_S, LIMITS)
    assert stop == Stop(Outcome.CANCELLED, "job 7 was cancelled by uid 1000, and that is final")


def test_a_job_that_slurm_does_not_show_yet_is_waited_for_but_not_for_ever():
    attempt, unknown = Attempt("7", seen_s=NOW_S), JobInfo("7")
    assert next_step([attempt], unknown, NOW_S + 59.0, LIMITS) == Wait(LIMITS.query_s)
    stop = next_step([attempt], unknown, NOW_S + 60.0, LIMITS)
    assert isinstance(stop, Stop)
    assert stop.outcome is Outcome.UNKNOWN
    assert "nothing of job 7 for 60 s" in stop.reason


def test_a_word_that_nobody_here_knows_is_never_acted_on():
    assert step_for(Attempt("7", 0.0), state="HYPERSLEEPING") == Wait(LIMITS.query_s)


@pytest.mark.parametrize("state", [s for s, fate in OUTCOMES.items() if fate is Outcome.FAILED])
def test_a_dead_job_comes_back_after_a_wait(state: str):
    assert step_for(dead(state), now_s=NOW_S + 1.0) == Wait(29.0)
    again = step_for(dead(state), now_s=NOW_S + 30.0)
    assert again == Resubmit(f"job 7 ended as {state}; resubmission 1 of at most 5")


def test_what_the_ranks_decided_is_kept_to():
    word = Decision(RequeueDecision.STOP, "after step 5: max_requeues")
    stop = step_for(Attempt("7", 0.0, NOW_S, "FAILED", word=word))
    assert isinstance(stop, Stop)
    assert stop.outcome is Outcome.FAILED
    assert stop.reason.endswith("its ranks decided so after step 5: max_requeues")
    word = Decision(RequeueDecision.FINISHED, "all steps")
    stop = step_for(Attempt("7", 0.0, NOW_S, "NODE_FAIL", word=word))
    assert isinstance(stop, Stop)
    assert stop.outcome is Outcome.SUCCEEDED


def test_two_deaths_in_a_row_without_progress_end_it():
    stop = step_for(dead(), dead("TIMEOUT", steps=0), now_s=NOW_S + 1e6)
    assert stop == Stop(
        Outcome.FAILED, "job 7 ended as TIMEOUT without progress, as the one before it"
    )


@pytest.mark.parametrize(
    "history",
    [
        (dead(), dead(lived_s=LIMITS.healthy_s)),
        (dead(lived_s=LIMITS.healthy_s), dead()),
        (dead(), dead(steps=3)),
        (dead("NODE_FAIL"), dead()),
        (dead(), dead("PREEMPTED")),
        (dead("NODE_FAIL"), dead("NODE_FAIL")),
    ],
)
def test_progress_or_a_failure_of_the_cluster_keeps_hope(history: tuple[Attempt, ...]):
    assert isinstance(step_for(*history, now_s=NOW_S + 1e6), Resubmit)


def test_steps_tell_more_than_time_does():
    """Two long lives that ended at the step where they began are two failures."""
    stuck = dead("TIMEOUT", steps=0, lived_s=86_400.0)
    assert isinstance(step_for(stuck, stuck, now_s=NOW_S + 1e6), Stop)


def test_resubmissions_are_counted_whatever_progress_they_made():
    history = [dead(steps=100)] * 6
    assert isinstance(step_for(*history[:5], now_s=NOW_S + 1e6), Resubmit)
    stop = step_for(*history, now_s=NOW_S + 1e6)
    assert stop == Stop(Outcome.FAILED, "job 7 ended as FAILED after 5 resubmissions, the limit")
    never = step_for(dead(), limits=ResubmitLimits(max_resubmits=0))
    assert isinstance(never, Stop)


def test_the_wait_doubles_up_to_a_cap_and_starts_anew_after_progress():
    deaths = [dead("NODE_FAIL")] * 9
    waits = [back_off_s(deaths[:n], LIMITS) for n in range(1, 10)]
    assert waits == [30, 60, 120, 240, 480, 960, 1800, 1800, 1800]
    assert back_off_s([*deaths, dead(steps=1)], LIMITS) == 30
    assert back_off_s([*deaths, dead(steps=1), dead("NODE_FAIL")], LIMITS) == 30
    assert back_off_s([dead("NODE_FAIL")] * 5000, LIMITS) == 1800
