"""Decide when a run must end and whether it is requeued, and requeue a job without a script of
ours.

The deciding functions read no clock, signal or file: callers pass measurements. Durations are in
seconds, and points in time count from 1970.

If no batch script of `tdp submit` waits for the decision, the job requeues itself. One process of
it asks Slurm, once, after all ranks have ended, and only while the job runs: in any other state
Slurm is ending or requeueing it already. TDP_BATCH means that the program which started the ranks
(the script of `tdp submit`, or submitit) asks Slurm instead.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.query import Runner, run_command
from torchdistpackage.launch.slurm.run_dir import Start, attempt_id, in_job, series_of
from torchdistpackage.run_files import RunDir

if TYPE_CHECKING:
    from torchdistpackage.config.schema import RequeueSection

EXIT_TEMPFAIL = 75
"""Exit code of a run that saved and ended early; a new start continues it (EX_TEMPFAIL)."""
EXIT_REQUEUE_DENIED = 76
"""Exit code of a job that could not be requeued, or whose ranks left no decision."""
NODE_SILENT = "a node that the ranks need starts no task"
"""Reason in a decision made by the batch script because its ranks made none."""
_QUANTILE = 0.98
"""Quantile of measured durations. It is high, because one step too many costs all steps since the
last save."""
_UNKNOWN_SAVE_STEPS = 10
_UNKNOWN_SAVE_S = 10.0
"""Assumed seconds of a save, at least, before one was measured; otherwise ten steps."""
_WAITS_S = (0.0, 1.0, 4.0)


class RequeueDecision(StrEnum):
    """Action of the batch script after all ranks have ended; first word of the decision file."""

    FINISHED = "finished"
    REQUEUE = "requeue"  # put the same job back in the queue, under its id
    CHAIN = "chain"  # submit a new job that depends on this one
    STOP = "stop"  # the state is saved; do not run again without the user
    AGAIN = "again"  # a rank died: restart all ranks in this job, from the last checkpoint


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision of all ranks with its reason, in one line for people and the batch script."""

    word: RequeueDecision
    reason: str

    def __str__(self) -> str:
        return f"{self.word} {' '.join(self.reason.split())}"

    @staticmethod
    def parse(line: str) -> Decision:
        """Parse a decision that `str()` wrote.

        Raises:
            LaunchError: the line starts with none of the words.
        """
        decision, _, reason = line.strip().partition(" ")
        try:
            return Decision(RequeueDecision(decision), reason)
        except ValueError:
            words = ", ".join(RequeueDecision)
            raise LaunchError(f"decision {line!r} does not start with one of {words}") from None


def quantile(values: Sequence[float], q: float = _QUANTILE) -> float:
    """Return the smallest of `values` such that at least a fraction `q` of them is not larger; 0 if
    there are none.
    """
    ordered = sorted(values)
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)] if ordered else 0.0


def required_time_s(
    step_s: Sequence[float], save_s: Sequence[float], margin_s: float, ahead: int = 2
) -> float:
    """Return the seconds that must remain before a step for the next steps and saves to fit.

    ahead: steps that still run if this one starts without a stop request. It is two, because a
    request made during a step ends the run after that step: skipping it now means running the next
    step too. Two saves are included, because a periodic one may come just before the last. `step_s`
    and `save_s` are measured durations, steps without saves.
    """
    step = quantile(step_s)
    save = quantile(save_s) if save_s else max(_UNKNOWN_SAVE_STEPS * step, _UNKNOWN_SAVE_S)
    return ahead * step + 2 * save + margin_s


def time_is_up(
    now_s: float,
    end_s: float | None,
    step_s: Sequence[float],
    save_s: Sequence[float],
    margin_s: float,
    ahead: int = 2,
) -> str:
    """Return why the step that begins now must be the last, or "" if there is time or no limit."""
    if end_s is None:
        return ""
    remaining_s, needed = end_s - now_s, required_time_s(step_s, save_s, margin_s, ahead)
    if remaining_s > needed:
        return ""
    return (
        f"the job ends in {remaining_s:.0f} s, and {ahead} steps, two saves and the margin of "
        f"{margin_s:g} s may take {needed:.0f} s"
    )


class RestartDenial(StrEnum):
    """Reasons for not restarting a job."""

    NO_PROGRESS = "no progress"  # in two starts in a row
    LIMIT = "limit"  # as many restarts as are allowed


def restart_denial(
    progress: Sequence[bool], num_starts: int, max_restarts: int
) -> RestartDenial | None:
    """Return why a job may not be restarted, by requeue or by the monitor; None if it may.

    progress: for each start, oldest first, whether it made progress or ended through no fault of
    its own. num_starts: starts that count against the limit, including the first.
    """
    if len(progress) >= 2 and not any(progress[-2:]):
        return RestartDenial.NO_PROGRESS
    return RestartDenial.LIMIT if num_starts > max_restarts else None


def restart_denied_reason(
    steps: Sequence[int], step: int, limits: RequeueSection, in_job: int = 0
) -> str:
    """Return why no further start follows those that began at `steps`, or "" if one may.

    step: where it would begin. in_job: number of those starts that were restarts within their job
    instead of requeues.
    """
    num = len(steps) - in_job
    progress = [began != ended for began, ended in pairwise([*steps, step])]
    match restart_denial(progress, num, limits.max_requeues):
        case RestartDenial.NO_PROGRESS:
            return f"two starts in a row ended at step {step}, where they had begun"
        case RestartDenial.LIMIT:
            return f"{num - 1} requeues used up launch.requeue.max_requeues={limits.max_requeues}"
        case None:
            return ""


def decide_in_job(
    died: str, previous: Decision | None, *, starts_left: int, time_up: str = "", bad_node: str = ""
) -> Decision:
    """Return whether to restart the ranks in this job, which goes on, or to stop.

    died: how the run failed, and after which step. previous: decision about the start before this
        one. starts_left: restarts left in this job. time_up: why the job is too short for a
        restart, or "". bad_node: evidence against the node, or "".
    """
    again = Decision(RequeueDecision.AGAIN, died)
    if bad_node:
        why = f"the node is to blame: {bad_node}"
    elif str(previous) == str(again):
        why = "the start before died of the same at the same step"
    elif time_up:
        why = time_up
    elif starts_left < 1:
        why = "no restart is left (launch.requeue.in_job_restarts, a signal, or a silent node)"
    else:
        return again
    return Decision(RequeueDecision.STOP, f"{died}; not again in this job: {why}")


def decide(
    reason: str, steps: Sequence[int], step: int, limits: RequeueSection, in_job: int = 0
) -> Decision:
    """Return what to do with a run that was asked to end for `reason` and saved `step`.

    steps: the step at which each start of this job began, the current one last. in_job: see
    `restart_denied_reason`.
    """
    reason = f"after step {step}: {reason}"
    if limits.mode == "never":
        return Decision(RequeueDecision.STOP, f"{reason}; launch.requeue.mode is never")
    if why := restart_denied_reason(steps, step, limits, in_job):
        return Decision(RequeueDecision.STOP, f"{reason}; not again: {why}")
    return Decision(RequeueDecision(limits.mode), reason)


def read_decision(files: RunDir, env: Mapping[str, str]) -> Decision | None:
    """Return the decision of this start's ranks, or None if they left none."""
    path = files.decision(attempt_id(env))
    return Decision.parse(path.read_text(encoding="utf-8")) if path.exists() else None


def restart_denied(files: RunDir, start: Start, limits: RequeueSection) -> str:
    """Return why this start, which Slurm began by itself, must not train, or "" if it may."""
    starts = series_of(files, start)
    steps = [s.step for s in starts[:-1]]
    why = restart_denied_reason(steps, start.step, limits, in_job(starts))
    return why and (
        f"not started again at step {start.step}, which is saved: {why}; submit it again to go on, "
        f"the logs of its starts are in {files.logs}"
    )


def requeue_id(env: Mapping[str, str]) -> str:
    """Return the id that `scontrol requeue` needs: that of one task of an array, never the entire
    array.
    """
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else env["SLURM_JOB_ID"]


def why_not(mode: str, env: Mapping[str, str], runner: Runner = run_command) -> str:
    """Return why a job without the script of tdp submit cannot be requeued, or "" if it can."""
    if mode == "never" or env.get("TDP_BATCH"):
        return ""
    cannot = f"job {requeue_id(env)} will not come back by itself"
    if mode == "chain":
        return f"{cannot}: only the script of tdp submit chains jobs; set launch.requeue.mode"
    try:
        facts = _facts(env, runner, lambda wait_s: None)
    except LaunchError as error:
        return f"{cannot}, as far as is known here: {error}"
    if facts.get("BatchFlag") == "0":
        return f"{cannot}: it has no batch script that could be run again"
    if facts.get("Requeue") == "0":
        return f"{cannot}: it was submitted with --no-requeue"
    return ""


def may_requeue(
    env: Mapping[str, str],
    runner: Runner = run_command,
    sleep: Callable[[float], object] = time.sleep,
) -> bool:
    """Return whether this job can be requeued and nobody else is requeueing or cancelling it.

    A job at its time limit may still be requeued while its processes save.

    Raises:
        LaunchError: Slurm does not answer.
    """
    job, facts = requeue_id(env), _facts(env, runner, sleep)
    state, reason = facts["JobState"], facts.get("Reason", "")
    if facts.get("BatchFlag") == "0":
        sys.stdout.write(f"job {job} has no batch script, so it is not requeued\n")
        return False
    if state != "RUNNING" and reason != "TimeLimit":
        sys.stdout.write(f"job {job} is not requeued here, it is {state}\n")
        return False
    return True


def requeue_self(
    files: RunDir,
    env: Mapping[str, str],
    runner: Runner = run_command,
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Requeue this job if that was decided and nobody else does it; return the exit code.

    Raises:
        LaunchError: Slurm did not take it.
    """
    decision = read_decision(files, env)
    if decision is None or env.get("TDP_BATCH"):
        return 0
    if decision.word is RequeueDecision.REQUEUE:
        if not may_requeue(env, runner, sleep):
            return EXIT_REQUEUE_DENIED
        _out(runner, "scontrol", "requeue", requeue_id(env))
    return EXIT_TEMPFAIL if decision.word is RequeueDecision.STOP else 0


def _facts(
    env: Mapping[str, str], runner: Runner, sleep: Callable[[float], object]
) -> dict[str, str]:
    """Return scontrol's information about this job, retrying while it shows nothing.

    Raises:
        LaunchError: scontrol fails, or still shows nothing.
    """
    job = requeue_id(env)
    for wait_s in _WAITS_S:
        sleep(wait_s)  # a busy controller may show an empty answer for a few seconds
        shown = _out(runner, "scontrol", "-o", "show", "job", job)
        facts = dict(field.split("=", 1) for field in shown.split() if "=" in field)
        if "JobState" in facts:
            return facts
    raise LaunchError(f"scontrol shows no state of job {job}; requeue or submit it by hand")


def _out(runner: Runner, *command: str) -> str:
    try:
        ran = runner(command)
    except LaunchError as error:
        raise LaunchError(f"not requeued: {error}") from error
    if ran.code:
        raise LaunchError(
            f"not requeued: {' '.join(command)} said: {ran.why}; requeue or submit it by hand"
        )
    return ran.out
