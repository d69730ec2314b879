"""Coming back where no batch script of ours waits for the decision: the job asks for it itself.

One rule: one process of a job asks, once, after all ranks have ended. A batch script of
`tdp submit` says with TDP_BATCH that it does this; submitit's own handler is called if it is there.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from types import FrameType

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.requeue import Decision, Word
from torchdistpackage.launch.slurm.files import JobFiles, start_id

_TIMEOUT_S = 60.0

Handler = Callable[[int, FrameType | None], object]
"""What was installed for a signal before this package noted it."""


def read_decision(files: JobFiles, env: Mapping[str, str]) -> Decision | None:
    """What the ranks of this start agreed on; None if they came to no end."""
    path = files.decision(start_id(env))
    return Decision.parse(path.read_text(encoding="utf-8")) if path.exists() else None


def requeue_id(env: Mapping[str, str]) -> str:
    """The job as `scontrol requeue` must be told: one task of an array, never the whole array."""
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else env["SLURM_JOB_ID"]


def come_back(files: JobFiles, env: Mapping[str, str]) -> None:
    """Requeue this job if that was decided and nobody else will do it.

    Raises:
        LaunchError: Slurm did not take it.
    """
    decision = read_decision(files, env)
    if decision is None or decision.word is not Word.REQUEUE or env.get("TDP_BATCH"):
        return
    job = requeue_id(env)
    state = _slurm("squeue", "-h", "-j", job, "-o", "%T").strip()
    if state != "RUNNING":
        sys.stdout.write(f"job {job} is {state or 'gone'}: Slurm itself ends or requeues it\n")
        return
    _slurm("scontrol", "requeue", job)


def by_handler(handler: Handler) -> None:
    """Let the submitit handler that was there before requeue; it does not return on rank 0."""
    handler(signal.SIGUSR2, None)


def _slurm(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"saved, but {' '.join(command)} failed: {error}") from error
    if done.returncode:
        raise LaunchError(
            f"saved, but {' '.join(command)} failed with code {done.returncode}: "
            f"{done.stderr.strip()}; requeue the job by hand"
        )
    return done.stdout
