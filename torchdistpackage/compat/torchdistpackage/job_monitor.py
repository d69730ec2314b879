"""The job monitor of the earlier package by its names: `tools.slurm_job_monitor`.

One rule: they ask the same functions as `tdp jobs` does, so what they say of a job is the same.
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
    """Submit a batch script; the job's id."""
    return sbatch(Path(file), os.environ)


def get_slurm_jobinfo(jobid: str | int) -> JobInfo:
    """What Slurm says of a job; without a state where it does not know it, yet or any more."""
    return query_jobs([str(jobid)]).jobs[str(jobid)]


def determine_job_is_alive(jobid: str | int) -> bool:
    """Whether the job is not over; a new one that Slurm does not show yet is not."""
    return not get_slurm_jobinfo(jobid).ended


def job_is_finished(jobid: str | int) -> bool:
    """Whether the job ended well."""
    return get_slurm_jobinfo(jobid).outcome is Outcome.SUCCEEDED


def scancel_slurm_job(jobid: str | int) -> None:
    """Cancel a job.

    Raises:
        LaunchError: Slurm refuses.
    """
    ran = run_command(["scancel", str(jobid)])
    if ran.code != 0:
        raise LaunchError(f"scancel {jobid} failed: {ran.why}")


def monitor_job(file: str | Path, query_interval: float = 10) -> Stop:
    """Submit a batch script, watch it, and submit it again when it failed and was not
    cancelled: a few times, and later each time. Returns why the watching ended."""
    limits = ResubmitLimits(query_s=query_interval)
    return monitor(ScriptTarget(Path(file), os.environ), limits=limits, say=log.info)
