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
    """Whether this job still runs, so that nobody else is requeueing or cancelling it.

    Raises:
        LaunchError: Slurm does not answer.
    """
    job = requeue_id(env)
    state = _out(runner, "squeue", "-h", "-j", job, "-o", "%T").strip()
    if state != "RUNNING":
        sys.stdout.write(f"job {job} is not requeued here, it is {state or 'gone'}\n")
    return state == "RUNNING"


def come_back(files: JobFiles, env: Mapping[str, str], runner: Runner = run) -> None:
    """Requeue this job if that was decided and nobody else will do it.

    Raises:
        LaunchError: Slurm did not take it.
    """
    decision = read_decision(files, env)
    if decision is None or decision.word is not Word.REQUEUE or env.get("TDP_BATCH"):
        return
    if may_requeue(env, runner):
        _out(runner, "scontrol", "requeue", requeue_id(env))


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
