"""Coming back where no batch script of ours waits for the decision: the job asks for it itself.

One rule: one process of a job asks, once, after all ranks have ended, and only while the job runs:
in any other state Slurm is ending or requeueing it already. TDP_BATCH says that whoever started the
ranks asks: the script of `tdp submit`, or submitit.
"""

import sys
from collections.abc import Mapping

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.requeue import Decision, Word
from torchdistpackage.launch.slurm.commands import Runner, run
from torchdistpackage.launch.slurm.files import JobFiles, start_id


def read_decision(files: JobFiles, env: Mapping[str, str]) -> Decision | None:
    """What the ranks of this start agreed on; None if they came to no end."""
    path = files.decision(start_id(env))
    return Decision.parse(path.read_text(encoding="utf-8")) if path.exists() else None


def requeue_id(env: Mapping[str, str]) -> str:
    """The job as `scontrol requeue` must be told: one task of an array, never the whole array."""
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else env["SLURM_JOB_ID"]


def may_requeue(env: Mapping[str, str], runner: Runner = run) -> bool:
    """Whether this job is one that can come back and that nobody else requeues or cancels.

    A job that is ended by its time limit may still be requeued while its processes save.

    Raises:
        LaunchError: Slurm does not answer.
    """
    job = requeue_id(env)
    shown = _out(runner, "scontrol", "-o", "show", "job", job)
    facts = dict(word.split("=", 1) for word in shown.split() if "=" in word)
    state, reason = facts.get("JobState", "gone"), facts.get("Reason", "")
    if facts.get("BatchFlag") == "0":
        sys.stdout.write(f"job {job} has no batch script, so it is not requeued\n")
        return False
    if state != "RUNNING" and reason != "TimeLimit":
        sys.stdout.write(f"job {job} is not requeued here, it is {state}\n")
        return False
    return True


def come_back(files: JobFiles, env: Mapping[str, str], runner: Runner = run) -> Word | None:
    """Requeue this job if that was decided and nobody else will do it; what was decided.

    Raises:
        LaunchError: Slurm did not take it.
    """
    decision = read_decision(files, env)
    if decision is None or env.get("TDP_BATCH"):
        return None
    if decision.word is Word.REQUEUE and may_requeue(env, runner):
        _out(runner, "scontrol", "requeue", requeue_id(env))
    return decision.word


def _out(runner: Runner, *command: str) -> str:
    try:
        ran = runner(command)
    except LaunchError as error:
        raise LaunchError(f"the run is saved, but not requeued: {error}") from error
    if ran.code:
        raise LaunchError(
            f"the run is saved, but not requeued: {' '.join(command)} said: {ran.why}; requeue or "
            f"submit it by hand"
        )
    return ran.out
