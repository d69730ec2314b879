"""A submission whose answer was lost is found again, so that it never becomes two jobs.

One rule: the intent is on the disk before sbatch is called, and goes when its job is noted or Slurm
has surely refused it. Who finds one looks for its job, which Slurm knows by the path of its script,
before anything is submitted; the lock of the run is held by then.
"""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.files import atomic_write
from torchdistpackage.launch.slurm.query import GRACE_S, CommandTimeout, Runner, array_job_id
from torchdistpackage.launch.slurm.run_dir import RunDir, Submission, append_record, read_records

_CLOCKS_DIFFER_S = 60.0
_SQUEUE = ("squeue", "-h", "--me", "-t", "all", "-o", "%F|%V|%o")
_TRIES_S = (0.0, 1.0, 3.0)
"""Waits before looks for a job whose answer has just been lost."""

Intent = tuple[RunDir, Submission]
"""Where a job is to be noted, and as what: without its id, or with its task of an array alone."""


def found(script: Path, since_s: float, noted: Sequence[str], runner: Runner) -> str:
    """The newest job of `script` submitted since then that nobody has noted; "" if there is none.

    Raises:
        LaunchError: the controller does not answer.
    """
    ran = runner(_SQUEUE)
    if ran.code != 0:
        raise LaunchError(f"squeue cannot say whether {script} was submitted: {ran.why}")
    known, jobs = {array_job_id(job) for job in noted}, list[tuple[float, int]]()
    for line in ran.out.splitlines():
        job, _, rest = line.strip().partition("|")
        submitted, _, command = rest.partition("|")
        ours = command == str(script) or command.startswith(f"{script} ")
        if job.isdigit() and submitted.isdigit() and ours and job not in known:
            jobs.append((float(submitted), int(job)))
    late = [pair for pair in jobs if pair[0] >= since_s - _CLOCKS_DIFFER_S]
    return str(max(late)[1]) if late else ""


def resolve(files: RunDir, runner: Runner, now_s: float) -> Submission | None:
    """What became of a submission of this run that was begun and never noted: its job, noted now.

    Raises:
        LaunchError: the controller does not answer, or the job may still come.
    """
    known = read_records(files.records)
    for intent in read_records(files.intent):
        job = found(Path(intent.script), intent.time_s, [r.job for r in known], runner)
        if job:
            return _note(files, intent, job)
        if (left_s := intent.time_s + GRACE_S - now_s) > 0:
            raise LaunchError(
                f"a submission of {files.run.name} got no answer {GRACE_S - left_s:.0f} s ago, and "
                f"Slurm may still take it; try again in {left_s:.0f} s, the job is looked for first"
            )
    files.intent.unlink(missing_ok=True)
    return None


def submit(
    intents: Sequence[Intent],
    sbatch: Callable[[], str],
    runner: Runner,
    sleep: Callable[[float], object] = time.sleep,
) -> list[Submission]:
    """Call `sbatch` for a job's id, and note it; the records. A lost answer is looked for.

    Raises:
        LaunchError: what sbatch raised, and Slurm has no such job. It may still come if that is
            `CommandTimeout`, or if Slurm could not be asked.
    """
    for files, record in intents:
        atomic_write(files.intent, json.dumps(asdict(record)) + "\n")
    try:
        job = sbatch()
    except LaunchError as error:
        job = _looked_for(intents, isinstance(error, CommandTimeout), runner, sleep)
        if not job:
            raise
    return [_note(files, record, job) for files, record in intents]


def _looked_for(
    intents: Sequence[Intent], lost: bool, runner: Runner, sleep: Callable[[float], object]
) -> str:
    """The id of a job that was taken although sbatch did not say so; else "".

    lost: nobody knows whether it was taken, so it is waited for, and the intents stay.
    """
    files, record = intents[0]
    noted = [r.job for r in read_records(files.records)]
    job = ""
    with contextlib.suppress(LaunchError):
        for wait_s in _TRIES_S if lost else _TRIES_S[:1]:
            sleep(wait_s)
            if job := found(Path(record.script), record.time_s, noted, runner):
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
