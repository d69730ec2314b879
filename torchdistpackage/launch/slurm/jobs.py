"""Query, cancel and resubmit submitted runs.

A run has at most one live job, so nothing is submitted before Slurm has said that all earlier ones
are over. A submission whose answer was lost is found again, so that it never becomes two jobs: its
intent is written to disk before sbatch is called, and removed when its job is recorded or Slurm has
certainly refused it. While an intent exists, its job is searched by the path of its script before
anything else is submitted; the run's lock is held meanwhile.
"""

import contextlib
import json
import logging
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from torchdistpackage.environment.slurm_env import scrub_slurm_env
from torchdistpackage.errors import HeldError, LaunchError
from torchdistpackage.files import atomic_write
from torchdistpackage.launch.lock import hold, holder_of
from torchdistpackage.launch.slurm.exclusion import exclusion, leave_out
from torchdistpackage.launch.slurm.query import (
    GRACE_S,
    CommandTimeout,
    JobInfo,
    QueryResult,
    Runner,
    array_job_id,
    job_id_of,
    query_jobs,
    run_command,
)
from torchdistpackage.launch.slurm.run_dir import Submission, append_record, read_records
from torchdistpackage.launch.slurm.runs import SubmittedRun
from torchdistpackage.run_files import RunDir

log = logging.getLogger(__name__)
_LOST = re.compile(r"timed? ?out|contact|connect|communicat|send|recv|message", re.IGNORECASE)
"""Substrings of sbatch's errors which mean that the controller's answer was lost, not that the
request failed.
"""
_CLOCKS_DIFFER_S = 60.0
_SQUEUE = ("squeue", "-h", "--me", "-t", "all", "-o", "%F|%V|%o")
_TRIES_S = (0.0, 1.0, 3.0)
"""Seconds to wait before each search for a job whose answer was lost; Slurm lists it with a
delay.
"""

Intent = tuple[RunDir, Submission]
"""Folder and record of a job to note: without its id, or with its task of an array."""


def query_runs(runs: Iterable[SubmittedRun], runner: Runner = run_command) -> QueryResult:
    """Return the states of the latest jobs of the runs; notes say why Slurm could not be asked."""
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
    """Return the run's jobs that are not over, including those too new to be listed by Slurm.

    Raises:
        LaunchError: the controller does not answer.
    """
    now = time.time() if now_s is None else now_s
    jobs = query_jobs([r.job for r in run.records], runner, since_s=run.records[0].time_s).jobs
    new = {record.job for record in run.records if now - record.time_s < GRACE_S}
    return [i for i in jobs.values() if (not i.ended if i.state else i.job in new)]


def cancel(runs: Sequence[SubmittedRun], runner: Runner = run_command) -> list[str]:
    """Cancel all live jobs of the runs, and return their ids.

    Raises:
        LaunchError: none is, or Slurm refuses.
    """
    ids = [info.job for run in runs for info in active_jobs(run, runner)]
    if not ids:
        over = ", ".join(f"{run.name} (job {run.latest.job})" for run in runs)
        raise LaunchError(
            f"there is nothing to cancel: {over} are over; tdp jobs ls lists the runs that are not"
        )
    ran = runner(["scancel", *ids])
    if ran.code != 0:
        raise LaunchError(f"scancel {' '.join(ids)} failed: {ran.why}")
    return ids


def refuse_held(folder: Path) -> None:
    """Raise HeldError if anybody trains in the run folder, in a job or not."""
    if holder := holder_of(RunDir(folder).run_lock):
        raise HeldError(
            f"{folder} is being written by {holder}; {holder.advice}, or give this run another "
            "run.name"
        )


def resubmit(
    run: SubmittedRun,
    env: Mapping[str, str],
    runner: Runner = run_command,
    *,
    now_s: float | None = None,
) -> Submission:
    """Submit the run's saved script again, record it in the run folder, and return the new record.

    env: the caller's environment; sbatch gets the user's variables of it.

    If an earlier call has a job whose answer was lost, that job is recorded instead.

    Raises:
        LaunchError: a job of the run is alive, its script is gone, or Slurm refuses.
    """
    now = time.time() if now_s is None else now_s
    with hold(run.files.lock, f"a submission of {run.name}"):
        if (lost := resolve_intent(run.files, runner, now)) is not None:
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
        nodes, notes = leave_out(script, run.files.suspects, env, runner, now, options)
        for note in notes:
            log.info("%s", note)
        options += exclusion(script, nodes)
        job, host = f"_{task}" if task else "", socket.gethostname()
        record = replace(run.latest, job=job, time_s=now, via="sbatch", host=host)
        call = partial(sbatch, script, env, runner, options=options)
        (noted,) = submit_with_intent([(run.files, record)], call, runner)
        return noted


def sbatch(
    script: Path,
    env: Mapping[str, str],
    runner: Runner = run_command,
    *,
    options: Sequence[str] = (),
) -> str:
    """Submit a batch script from a clean environment and return the job's id.

    Raises:
        LaunchError: there is no such script, or Slurm does not take it.
        CommandTimeout: it may have taken it.
    """
    if not script.is_file():
        raise LaunchError(f"there is no batch script {script}; submit the run anew")
    ran = runner(["sbatch", "--parsable", *options, str(script)], env=scrub_slurm_env(env))
    job = job_id_of(ran.out)
    if ran.code == 0 and job:
        return job
    lost = ran.code == 0 or _LOST.search(ran.err)
    raise (CommandTimeout if lost else LaunchError)(f"sbatch refused {script}: {ran.why}")


def _lost_job(script: Path, since_s: float, noted: Sequence[str], runner: Runner) -> str:
    """Return the newest unrecorded job of `script` submitted since `since_s`, or "".

    Raises:
        LaunchError: the controller does not answer.
    """
    ran = runner(_SQUEUE)
    if ran.code != 0:
        raise LaunchError(
            f"squeue cannot say whether {script} was submitted: {ran.why}; try again once it "
            "answers"
        )
    noted_ids, jobs = {array_job_id(job) for job in noted}, list[tuple[float, int]]()
    for line in ran.out.splitlines():
        match = re.fullmatch(r"(\d+)\|(\d+)\|(.*)", line.strip())
        if match and match[1] not in noted_ids and f"{match[3]} ".startswith(f"{script} "):
            jobs.append((float(match[2]), int(match[1])))
    late = [pair for pair in jobs if pair[0] >= since_s - _CLOCKS_DIFFER_S]
    return str(max(late)[1]) if late else ""


def resolve_intent(files: RunDir, runner: Runner, now_s: float) -> Submission | None:
    """Find the job of a submission that was begun and never recorded; record and return it.

    Raises:
        LaunchError: the controller does not answer, or the job may still come.
    """
    records = read_records(files.records)
    for intent in read_records(files.intent):
        job = _lost_job(Path(intent.script), intent.time_s, [r.job for r in records], runner)
        if job:
            return _note(files, intent, job)
        if (left_s := intent.time_s + GRACE_S - now_s) > 0:
            raise LaunchError(
                f"a submission of {files.run.name} got no answer {GRACE_S - left_s:.0f} s ago, "
                f"and Slurm may still accept it; try again in {left_s:.0f} s, which first looks "
                "for that job"
            )
    files.intent.unlink(missing_ok=True)
    return None


def submit_with_intent(
    intents: Sequence[Intent],
    call: Callable[[], str],
    runner: Runner,
    sleep: Callable[[float], object] = time.sleep,
) -> list[Submission]:
    """Submit a job with `call` and record its id; return the records. A lost answer is searched
    for.

    Raises:
        LaunchError: what sbatch raised, and Slurm has no such job. It may still come if that is
            `CommandTimeout`, or if Slurm could not be asked.
    """
    for files, record in intents:
        atomic_write(files.intent, json.dumps(asdict(record)) + "\n")
    try:
        job = call()
    except LaunchError as error:
        job = _find_taken(intents, isinstance(error, CommandTimeout), runner, sleep)
        if not job:
            raise
    return [_note(files, record, job) for files, record in intents]


def _find_taken(
    intents: Sequence[Intent], lost: bool, runner: Runner, sleep: Callable[[float], object]
) -> str:
    """Return the id of a job that Slurm accepted although sbatch reported none, or "".

    lost: it is unknown whether Slurm accepted the job, so wait for it and keep the intents.
    """
    files, record = intents[0]
    noted = [r.job for r in read_records(files.records)]
    job = ""
    with contextlib.suppress(LaunchError):
        for wait_s in _TRIES_S if lost else _TRIES_S[:1]:
            sleep(wait_s)
            if job := _lost_job(Path(record.script), record.time_s, noted, runner):
                return job
        if not lost:
            for files, _ in intents:
                files.intent.unlink(missing_ok=True)
    return job


def _note(files: RunDir, record: Submission, job: str) -> Submission:
    noted = replace(record, job=f"{job}{record.job}")
    append_record(files.records, noted)
    files.intent.unlink(missing_ok=True)
    return noted
