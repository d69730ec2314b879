"""Whether a job that is dead is submitted again, and when.

One rule: this decides from what was seen and the time, and does nothing, so every story of a job
can be told with a clock that nobody waits for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchdistpackage.launch.requeue import Decision, RequeueDecision
from torchdistpackage.launch.slurm.query import GRACE_S, NOT_ITS_FAULT, JobInfo, Outcome


@dataclass(frozen=True, slots=True)
class ResubmitLimits:
    """How often, and how soon, a job is submitted again.

    healthy_s: a job that lived so long counts as one that made progress, where no step tells.
    unknown_s: how long Slurm may know nothing of the job before it is given up.
    """

    max_resubmits: int = 5
    first_wait_s: float = 30.0
    max_wait_s: float = 1800.0
    healthy_s: float = 600.0
    unknown_s: float = GRACE_S
    query_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One submission, as far as it was watched.

    seen_s: when Slurm last knew it, at first the time of its submission. ended_s: when it was first
    seen dead. steps: how many it got further, None where nobody counts. word: what its ranks
    decided in the end.
    """

    job: str
    seen_s: float
    ended_s: float | None = None
    state: str = ""
    elapsed_s: float = 0.0
    steps: int | None = None
    word: Decision | None = None

    def made_progress(self, limits: ResubmitLimits) -> bool:
        return self.elapsed_s >= limits.healthy_s if self.steps is None else self.steps > 0

    def permanent(self, limits: ResubmitLimits) -> bool:
        """Died by itself and without progress."""
        return self.state not in NOT_ITS_FAULT and not self.made_progress(limits)


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float


@dataclass(frozen=True, slots=True)
class Resubmit:
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """fate: how the job ended, or UNKNOWN."""

    outcome: Outcome
    reason: str


Step = Wait | Resubmit | Stop


def next_step(
    history: Sequence[Attempt], info: JobInfo, now_s: float, limits: ResubmitLimits
) -> Step:
    """What to do about the job now. history: all submissions so far, the present one last."""
    attempt = history[-1]
    if info.outcome is Outcome.ALIVE:
        return Wait(limits.query_s)
    if info.outcome is Outcome.SUCCEEDED:
        return Stop(info.outcome, f"job {info.job} is {info.state}")
    if info.outcome is Outcome.CANCELLED:
        by = f" by uid {info.by}" if info.by else ""
        return Stop(info.outcome, f"job {info.job} was cancelled{by}, and that is final")
    if info.outcome is Outcome.UNKNOWN:
        if info.state or now_s - attempt.seen_s < limits.unknown_s:
            return Wait(limits.query_s)
        return Stop(
            info.outcome,
            f"Slurm has known nothing of job {info.job} for {now_s - attempt.seen_s:.0f} s, so "
            f"nobody can tell how it ended; see its log, and submit it again if it is to go on",
        )
    return _after_death(history, now_s, limits)


def _after_death(history: Sequence[Attempt], now_s: float, limits: ResubmitLimits) -> Step:
    attempt, died = history[-1], f"job {history[-1].job} ended as {history[-1].state}"
    if attempt.word is not None and attempt.word.word is RequeueDecision.FINISHED:
        return Stop(Outcome.SUCCEEDED, f"{died}, but its ranks had finished {attempt.word.reason}")
    if attempt.word is not None and attempt.word.word is RequeueDecision.STOP:
        return Stop(Outcome.FAILED, f"{died}: its ranks decided so {attempt.word.reason}")
    if len(history) > limits.max_resubmits:
        return Stop(Outcome.FAILED, f"{died} after {limits.max_resubmits} resubmissions, the limit")
    if len(history) > 1 and all(a.permanent(limits) for a in history[-2:]):
        return Stop(Outcome.FAILED, f"{died} without progress, as the one before it")
    due_s = (now_s if attempt.ended_s is None else attempt.ended_s) + back_off_s(history, limits)
    if now_s < due_s:
        return Wait(min(due_s - now_s, limits.max_wait_s))
    return Resubmit(f"{died}; resubmission {len(history)} of at most {limits.max_resubmits}")


def back_off_s(history: Sequence[Attempt], limits: ResubmitLimits) -> float:
    """The wait before a resubmission: doubled with each death in a row that brought no progress."""
    in_a_row = 0
    for attempt in reversed(history):
        if attempt.made_progress(limits):
            break
        in_a_row += 1
    return min(limits.first_wait_s * 2.0 ** min(max(in_a_row - 1, 0), 60), limits.max_wait_s)
