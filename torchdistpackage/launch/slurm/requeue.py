"""Coming back where no batch script of ours waits for the decision: the job asks for it itself.

One rule: one process of a job asks, once, after all ranks have ended, and only while the job runs:
in any other state Slurm is ending or requeueing it already. TDP_BATCH says that whoever started the
ranks asks: the script of `tdp submit`, or submitit.
"""

import sys
import time
from collections.abc import Callable, Mapping

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.requeue import (
    EXIT_REQUEUE_DENIED,
    EXIT_TEMPFAIL,
    Decision,
    RequeueDecision,
    RequeueLimits,
    restart_denied_reason,
)
from torchdistpackage.launch.slurm.query import Runner, run_command
from torchdistpackage.launch.slurm.run_dir import RunDir, Start, attempt_id, in_job, series_of

_WAITS_S = (0.0, 1.0, 4.0)


def read_decision(files: RunDir, env: Mapping[str, str]) -> Decision | None:
    """What the ranks of this start agreed on; None if they came to no end."""
    path = files.decision(attempt_id(env))
    return Decision.parse(path.read_text(encoding="utf-8")) if path.exists() else None


def restart_denied(files: RunDir, start: Start, limits: RequeueLimits) -> str:
    """Why this start, which Slurm made of itself, is not to train; "" if it is."""
    before = series_of(files, start)[:-1]
    why = restart_denied_reason(
        [s.step for s in before], start.step, limits, in_job([*before, start])
    )
    return why and (
        f"not started again at step {start.step}, which is saved: {why}; submit it again to go on, "
        f"the logs of its starts are in {files.logs}"
    )


def requeue_id(env: Mapping[str, str]) -> str:
    """The job as `scontrol requeue` must be told: one task of an array, never the whole array."""
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else env["SLURM_JOB_ID"]


def why_not(mode: str, env: Mapping[str, str], runner: Runner = run_command) -> str:
    """Why this job, whose script is not ours, will not come back in `mode`; "" if it can."""
    if mode == "never" or env.get("TDP_BATCH"):
        return ""
    cannot = f"job {requeue_id(env)} will not come back by itself"
    if mode == "chain":
        return f"{cannot}: only the script of tdp submit chains jobs; set launch.requeue.mode"
    try:
        facts = _facts(env, runner, lambda wait_s: None)
    except LaunchError as error:
        return f"{cannot}, as far as can be told here: {error}"
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
    """Whether this job is one that can come back and that nobody else requeues or cancels.

    A job that is ended by its time limit may still be requeued while its processes save.

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
    """Requeue this job if that was decided and nobody else will do it; the code to end with.

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
    """What scontrol shows of this job; asked again while it shows nothing.

    Raises:
        LaunchError: it fails, or goes on showing nothing.
    """
    job = requeue_id(env)
    for wait_s in _WAITS_S:
        sleep(wait_s)
        shown = _out(runner, "scontrol", "-o", "show", "job", job)
        facts = dict(word.split("=", 1) for word in shown.split() if "=" in word)
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
