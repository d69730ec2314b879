"""What is done to submitted runs: look, cancel, submit again.

One rule: a run has at most one job that is alive, so nothing is submitted before Slurm has said
that all earlier ones are over.
"""

import re
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torchdistpackage.errors import HeldError, LaunchError
from torchdistpackage.launch.lock import hold, holder_of
from torchdistpackage.launch.slurm import node_blocklist
from torchdistpackage.launch.slurm.environment import scrub_slurm_env
from torchdistpackage.launch.slurm.intent import resolve, submit
from torchdistpackage.launch.slurm.query import (
    GRACE_S,
    CommandTimeout,
    JobInfo,
    QueryResult,
    Runner,
    array_job_id,
    query_jobs,
    run_command,
)
from torchdistpackage.launch.slurm.run_dir import RunDir, Submission
from torchdistpackage.launch.slurm.runs import SubmittedRun

_LOST = re.compile(r"timed? ?out|contact|connect|communicat|send|recv|message", re.IGNORECASE)
"""In what sbatch says when it is the answer of the controller that failed, not the request."""
_EXCLUDE = re.compile(r"^#SBATCH\s+(?:--exclude[=\s]|-x\s*)\s*(\S+)", re.MULTILINE)


def query_runs(runs: Iterable[SubmittedRun], runner: Runner = run_command) -> QueryResult:
    """How the latest jobs of the runs are. If Slurm cannot be asked, its notes say why."""
    latest = [run.latest for run in runs]
    since_s = min((record.time_s for record in latest), default=None)
    try:
        return query_jobs([record.job for record in latest], runner, since_s=since_s)
    except LaunchError as error:
        silent = {r.job: JobInfo(r.job, reason="Slurm does not answer") for r in latest}
        return QueryResult(silent, (str(error),))


def active_jobs(
    run: SubmittedRun, runner: Runner = run_command, *, now_s: float | None = None
) -> list[JobInfo]:
    """The run's jobs that are not over, or so new that Slurm may not show them yet.

    Raises:
        LaunchError: the controller does not answer.
    """
    now = time.time() if now_s is None else now_s
    jobs = query_jobs([r.job for r in run.records], runner, since_s=run.records[0].time_s).jobs
    submitted = {record.job: record.time_s for record in run.records}

    def may_live(info: JobInfo) -> bool:
        new = now - submitted[info.job] < GRACE_S
        return not info.ended if info.state else new

    return [info for info in jobs.values() if may_live(info)]


def cancel(runs: Sequence[SubmittedRun], runner: Runner = run_command) -> list[str]:
    """Cancel every job of the runs that is alive, and return their ids.

    Raises:
        LaunchError: none is, or Slurm refuses.
    """
    ids = [info.job for run in runs for info in active_jobs(run, runner)]
    if not ids:
        over = ", ".join(f"{run.name} (job {run.latest.job})" for run in runs)
        raise LaunchError(f"there is nothing to cancel: over are {over}")
    ran = runner(["scancel", *ids])
    if ran.code != 0:
        raise LaunchError(f"scancel {' '.join(ids)} failed: {ran.why}")
    return ids


def refuse_held(folder: Path) -> None:
    """Raises HeldError if anybody trains in the run folder, in a job or not."""
    if held := holder_of(RunDir(folder).run_lock):
        raise HeldError(
            f"{folder} is being written by {held}; {held.advice}, or give this run another run.name"
        )


def resubmit(
    run: SubmittedRun,
    env: Mapping[str, str],
    runner: Runner = run_command,
    *,
    now_s: float | None = None,
) -> Submission:
    """Submit the run's kept script again, note it in the run folder, and return the new record.

    env: the caller's environment; sbatch gets what is the user's of it.

    A job of an earlier call whose answer was lost is noted instead.

    Raises:
        LaunchError: a job of the run is alive, its script is gone, or Slurm refuses.
    """
    with hold(run.files.lock, f"a submission of {run.name}"):
        return _resubmit(run, env, runner, time.time() if now_s is None else now_s)


def _resubmit(run: SubmittedRun, env: Mapping[str, str], runner: Runner, now: float) -> Submission:
    if (lost := resolve(run.files, runner, now)) is not None:
        return lost
    for info in active_jobs(run, runner, now_s=now):
        raise LaunchError(
            f"{run.name} is not over: job {info.job} is {info.state or 'just submitted'}; "
            f"cancel it first (tdp jobs cancel {run.name}), or wait"
        )
    refuse_held(run.folder)
    script = Path(run.latest.script)
    task = run.latest.job[len(array_job_id(run.latest.job)) + 1 :]
    options = [f"--array={task}"] if task else []
    nodes = node_blocklist.excluded(run.files.suspects, now)
    options += exclusion(script, nodes)
    record = replace(
        run.latest,
        job=f"_{task}" if task else "",
        time_s=now,
        via="sbatch",
        host=socket.gethostname(),
    )
    intents = [(run.files, record)]
    (noted,) = submit(intents, lambda: sbatch(script, env, runner, options=options), runner)
    return noted


def exclusion(script: Path, nodes: Sequence[str]) -> list[str]:
    """The option that leaves out `nodes`, and those that the script leaves out itself.

    An option on the command line takes the place of the script's own.
    """
    if not nodes:
        return []
    own = _EXCLUDE.findall(script.read_text(encoding="utf-8")) if script.is_file() else []
    return [f"--exclude={','.join([*own, *nodes])}"]


def sbatch(
    script: Path,
    env: Mapping[str, str],
    runner: Runner = run_command,
    *,
    options: Sequence[str] = (),
) -> str:
    """Submit a batch script from a clean environment; the job's id.

    Raises:
        LaunchError: there is no such script, or Slurm does not take it.
        CommandTimeout: it may have taken it.
    """
    if not script.is_file():
        raise LaunchError(f"there is no batch script {script}; submit the run anew")
    ran = runner(["sbatch", "--parsable", *options, str(script)], env=scrub_slurm_env(env))
    job = ran.out.strip().rpartition("\n")[2].partition(";")[0]
    if ran.code == 0 and job.isdigit():
        return job
    lost = ran.code == 0 or _LOST.search(ran.err)
    raise (CommandTimeout if lost else LaunchError)(f"sbatch does not take {script}: {ran.why}")
