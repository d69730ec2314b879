"""The earlier package's job monitor, `tools.slurm_job_monitor`.

One rule: it calls the functions of `tdp jobs`, so both report the same state of a job. No
torch.
"""

import logging
import os
from pathlib import Path

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.jobs import sbatch
from torchdistpackage.launch.slurm.monitor import ResubmitLimits, ScriptTarget, Stop, monitor
from torchdistpackage.launch.slurm.query import JobInfo, Outcome, query_jobs, run_command

log = logging.getLogger(__name__)


def launch_job(file: str | Path) -> str:
    """Submit a batch script and return the job's id."""
    return sbatch(Path(file), os.environ)


def get_slurm_jobinfo(jobid: str | int) -> JobInfo:
    """Return what Slurm knows of a job; it has no state if Slurm does not list the job."""
    return query_jobs([str(jobid)]).jobs[str(jobid)]


def determine_job_is_alive(jobid: str | int) -> bool:
    """Return whether the job has not ended; True for a new job that Slurm does not show yet."""
    return not get_slurm_jobinfo(jobid).ended


def job_is_finished(jobid: str | int) -> bool:
    """Return whether the job succeeded."""
    return get_slurm_jobinfo(jobid).outcome is Outcome.SUCCEEDED


def scancel_slurm_job(jobid: str | int) -> None:
    """Cancel a job.

    Raises:
        LaunchError: Slurm refuses.
    """
    ran = run_command(["scancel", str(jobid)])
    if ran.code != 0:
        raise LaunchError(f"scancel {jobid} failed: {ran.why}; cancel it by hand")


def monitor_job(file: str | Path, query_interval: float = 10) -> Stop:
    """Submit a batch script, watch it, and submit it again if it fails without being cancelled.

    It retries a few times, with growing pauses. Returns why it stopped watching.
    """
    limits = ResubmitLimits(query_s=query_interval)
    return monitor(ScriptTarget(Path(file), os.environ), limits=limits, say=log.info)
