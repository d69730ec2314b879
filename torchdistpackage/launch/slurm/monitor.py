"""Watch one job, and submit it again when it fails.

`next_step` is a pure decision from observations and the time; `monitor` carries it out.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm import jobs
from torchdistpackage.launch.slurm.query import (
    GRACE_S,
    NOT_ITS_FAULT,
    CommandTimeout,
    JobInfo,
    Outcome,
    Runner,
    query_jobs,
    run_command,
)
from torchdistpackage.launch.slurm.requeue import (
    Decision,
    RequeueDecision,
    RestartDenial,
    restart_denial,
)
from torchdistpackage.launch.slurm.runs import SubmittedRun, last_decision, progress, read_run

_ARRAY = re.compile(r"^#SBATCH\s+(--array|-a)\b", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ResubmitLimits:
    """Limits of the monitor: how often and how soon it resubmits a job.

    healthy_s: a job that lived this long counts as having made progress, even without steps.
    unknown_s: how long Slurm may not know the job before it is given up.
    """

    max_resubmits: int = 5
    first_wait_s: float = 30.0
    max_wait_s: float = 1800.0
    healthy_s: float = 600.0
    unknown_s: float = GRACE_S
    query_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One submission, as far as it was observed.

    seen_s: when Slurm last knew it; initially its submission. ended_s: when it was first seen dead.
    steps: how many steps it progressed, None if steps are not counted. word: the final decision of
    its ranks.
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


@dataclass(frozen=True, slots=True)
class Wait:
    seconds: float


@dataclass(frozen=True, slots=True)
class Resubmit:
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The result of the monitor. outcome: how the job ended, or UNKNOWN."""

    outcome: Outcome
    reason: str


def next_step(
    history: Sequence[Attempt], info: JobInfo, now_s: float, limits: ResubmitLimits
) -> Wait | Resubmit | Stop:
    """Return the next action for the job: wait, resubmit, or stop.

    history: all submissions so far, the current one last.
    """
    silent_s = now_s - history[-1].seen_s
    if info.outcome is Outcome.FAILED:
        return _after_death(history, now_s, limits)
    if info.outcome is Outcome.SUCCEEDED:
        return Stop(info.outcome, f"job {info.job} is {info.state}")
    if info.outcome is Outcome.CANCELLED:
        by = f" by uid {info.by}" if info.by else ""
        return Stop(info.outcome, f"job {info.job} was cancelled{by}, and that is final")
    if info.outcome is Outcome.ALIVE or info.state or silent_s < limits.unknown_s:
        return Wait(limits.query_s)
    return Stop(
        info.outcome,
        f"Slurm has known nothing of job {info.job} for {silent_s:.0f} s, so its end is not known; "
        f"see its log, and submit it again if it is to go on",
    )


def _after_death(
    history: Sequence[Attempt], now_s: float, limits: ResubmitLimits
) -> Wait | Resubmit | Stop:
    last, died = history[-1], f"job {history[-1].job} ended as {history[-1].state}"
    if last.word is not None and last.word.word is RequeueDecision.FINISHED:
        return Stop(Outcome.SUCCEEDED, f"{died}, but its ranks had finished {last.word.reason}")
    if last.word is not None and last.word.word is RequeueDecision.STOP:
        return Stop(Outcome.FAILED, f"{died}: its ranks decided so {last.word.reason}")
    progress = [a.state in NOT_ITS_FAULT or a.made_progress(limits) for a in history]
    match restart_denial(progress, len(history), limits.max_resubmits):
        case RestartDenial.NO_PROGRESS:
            return Stop(Outcome.FAILED, f"{died} without progress, as the one before it")
        case RestartDenial.LIMIT:
            why = f"after {limits.max_resubmits} resubmissions, the limit"
            return Stop(Outcome.FAILED, f"{died} {why}")
        case None:
            pass
    due_s = (now_s if last.ended_s is None else last.ended_s) + back_off_s(history, limits)
    if now_s < due_s:
        return Wait(min(due_s - now_s, limits.max_wait_s))
    return Resubmit(f"{died}; resubmission {len(history)} of at most {limits.max_resubmits}")


def back_off_s(history: Sequence[Attempt], limits: ResubmitLimits) -> float:
    """Return the seconds to wait before a resubmission.

    They double with each consecutive death without progress.
    """
    in_a_row = 0
    for attempt in reversed(history):
        if attempt.made_progress(limits):
            break
        in_a_row += 1
    return min(limits.first_wait_s * 2.0 ** min(max(in_a_row - 1, 0), 60), limits.max_wait_s)


class RunTarget:
    """A submitted run. Its folder is read anew each time, because others may resubmit it too."""

    def __init__(
        self, run: SubmittedRun, env: Mapping[str, str], runner: Runner = run_command
    ) -> None:
        self._run, self._env, self._runner = run, env, runner

    def _now(self) -> SubmittedRun:
        return read_run(self._run.folder) or self._run

    def job(self) -> str:
        """The id of the newest job."""
        return self._now().latest.job

    def step(self) -> int | None:
        """Return the step that the run has reached; None if steps are not counted."""
        return progress(self._run.files).step or 0

    def word(self) -> Decision | None:
        """Return the ranks' decision at the end of the newest job."""
        return last_decision(self._now())

    def resubmit(self) -> str:
        return jobs.resubmit(self._now(), self._env, self._runner).job


class ScriptTarget:
    """A batch script of any kind, which the constructor submits."""

    def __init__(self, script: Path, env: Mapping[str, str], runner: Runner = run_command) -> None:
        self._script, self._env, self._runner = script, env, runner
        if script.is_file() and _ARRAY.search(script.read_text(encoding="utf-8", errors="replace")):
            raise LaunchError(
                f"{script} is an array, whose tasks end one by one, so it cannot be submitted "
                f"again as a whole; watch the runs of a sweep one by one, by their names"
            )
        self._job = self.resubmit()

    def job(self) -> str:
        return self._job

    def step(self) -> int | None:
        return None

    def word(self) -> Decision | None:
        return None

    def resubmit(self) -> str:
        self._job = jobs.sbatch(self._script, self._env, self._runner)
        return self._job


Target = RunTarget | ScriptTarget


def monitor(
    target: Target,
    *,
    limits: ResubmitLimits | None = None,
    runner: Runner = run_command,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], object] = time.sleep,
    say: Callable[[str], object] = lambda line: None,
) -> Stop:
    """Watch `target` to its end, and resubmit it as `limits` allow; return why it stopped.

    say: called with one line for each event. An interrupt ends only the watching; the job is not
    affected.

    Raises:
        LaunchError: Slurm refused to take the job again more often than `max_resubmits`, or gave no
            answer, so that it may have taken it.
    """
    limits, last_line = limits or ResubmitLimits(), ""
    history = [Attempt(target.job(), clock())]
    first_step = target.step() or 0

    def say_once(line: str) -> None:
        nonlocal last_line
        if line != last_line:
            say(line)
        last_line = line

    while True:
        if (job := target.job()) != history[-1].job:  # it came by itself: the same submission
            say(f"job {job} continues the run of job {history[-1].job}")
            history[-1], first_step = Attempt(job, clock()), target.step() or 0
        try:
            info = query_jobs([job], runner).jobs[job]
        except LaunchError as error:
            say_once(f"{error}; asked again every {limits.query_s:g} s")
            sleep(limits.query_s)
            continue
        history[-1] = _observed(history[-1], info, target, first_step, clock())
        say_once(_line(info))
        step = next_step(history, info, clock(), limits)
        if isinstance(step, Stop):
            if target.job() != job:  # it chained its successor just before it ended
                continue
            say(step.reason)
            return step
        if isinstance(step, Wait):
            if info.outcome is Outcome.FAILED:
                say(f"job {job} is submitted again in {step.seconds:.0f} s")
            sleep(step.seconds)
            continue
        say(step.reason)
        new = _submit_again(target, limits, sleep, say)
        history.append(Attempt(new, clock()))
        first_step = target.step() or 0


def _observed(
    attempt: Attempt, info: JobInfo, target: Target, first_step: int, now_s: float
) -> Attempt:
    """Return the attempt updated with Slurm's current answer. first_step: step at which its job
    began.
    """
    if info.state:
        attempt = replace(attempt, seen_s=now_s, state=info.state)
    if info.outcome is not Outcome.FAILED:
        return replace(attempt, ended_s=None)
    if attempt.ended_s is not None:
        return attempt
    step = target.step()
    return replace(
        attempt,
        ended_s=now_s,
        elapsed_s=info.elapsed_s or 0.0,
        steps=None if step is None else step - first_step,
        word=target.word(),
    )


def _submit_again(
    target: Target,
    limits: ResubmitLimits,
    sleep: Callable[[float], object],
    say: Callable[[str], object],
) -> str:
    """Keep asking while Slurm refuses, as it does during a restart or if a user has too many
    jobs.
    """
    refused = 0
    while True:
        try:
            return target.resubmit()
        except CommandTimeout:
            raise
        except LaunchError as error:
            refused += 1
            if refused > limits.max_resubmits:
                raise
            wait_s = min(limits.first_wait_s * 2.0**refused, limits.max_wait_s)
            say(f"{error}; tried again in {wait_s:.0f} s")
            sleep(wait_s)


def _line(info: JobInfo) -> str:
    if not info.state:
        return f"job {info.job} is not known to Slurm, yet or any more"
    where = f" on {info.nodes}" if info.nodes else ""
    return f"job {info.job} is {info.state}{where}" + (f" ({info.reason})" if info.reason else "")
