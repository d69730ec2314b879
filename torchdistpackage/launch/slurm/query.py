"""Asks Slurm how jobs are: the controller first, then the accounting where there is one.

One rule: the controller is right about what it knows. The accounting lags behind it by seconds (a
job that is being requeued is NODE_FAIL there), so it only adds to the controller's answer, and
speaks for jobs that the controller has forgotten. An answer is what stands on standard output after
code 0: for an id that it does not know squeue fails, as it does when it is not answered; of several
it is silent, so a single one is asked for twice.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.commands import Runner, run
from torchdistpackage.launch.slurm.states import (
    SACCT,
    SQUEUE,
    JobInfo,
    Outcome,
    array_job_id,
    merge_array,
    parse_sacct,
    parse_squeue,
)

GRACE_S = 60.0
"""A job without a state is not given up for so long after it was submitted or last seen."""
_EARLIER_S = 3600.0
"""The accounting is asked for jobs from so long before the first submission on: clocks differ."""
_TIME = "%Y-%m-%dT%H:%M:%S"


@dataclass(frozen=True, slots=True)
class QueryResult:
    """jobs: every id that was asked for. notes: what could not be asked, and why, for people."""

    jobs: Mapping[str, JobInfo]
    notes: tuple[str, ...] = ()


def query_jobs(
    ids: Sequence[str], runner: Runner = run, *, since_s: float | None = None
) -> QueryResult:
    """How the jobs `ids` are; without a state those that nobody knows, yet or any more.

    ids: `123`, or `123_4` for a task of an array; `123` of an array is its tasks taken together.
    since_s: when the earliest was submitted; keeps out jobs of long ago that had the same ids.

    Raises:
        LaunchError: the controller does not answer. A job of which nothing is heard is then not
            one that is gone.
    """
    if not ids:
        return QueryResult({})
    asked = _joined(ids)
    ran = runner([*SQUEUE, "-j", asked if "," in asked else f"{asked},{asked}"])
    if ran.code != 0:
        raise LaunchError(f"squeue cannot say how jobs {_joined(ids)} are: {ran.why}")
    known = parse_squeue(ran.out)
    gone = [job for job in ids if _select(job, known).outcome is not Outcome.ALIVE]
    if not gone:
        return QueryResult({job: _select(job, known) for job in ids})
    try:
        counted, note = _accounting(gone, runner, since_s), ""
    except LaunchError as error:
        counted, note = {}, str(error)
    merged = {job: _merge(job, known.get(job), counted.get(job)) for job in {**counted, **known}}
    jobs = {job: _select(job, merged) for job in ids}
    missed = note and any(not info.state for info in jobs.values())
    return QueryResult(jobs, (note,) if missed else ())


def _accounting(ids: Sequence[str], runner: Runner, since_s: float | None) -> dict[str, JobInfo]:
    since = time.strftime(_TIME, time.localtime((since_s or 0.0) - _EARLIER_S))
    ran = runner([*SACCT, "-j", _joined(ids), *(["-S", since] if since_s is not None else [])])
    if ran.code != 0:
        raise LaunchError(f"no word from the accounting: {ran.why}")
    return parse_sacct(ran.out)


def _joined(ids: Sequence[str]) -> str:
    return ",".join(dict.fromkeys(map(array_job_id, ids)))


def _merge(job: str, known: JobInfo | None, counted: JobInfo | None) -> JobInfo:
    if known is None:
        if counted is None or counted.ended:
            return counted or JobInfo(job)
        return JobInfo(
            job, reason=f"the controller does not know it, though sacct says {counted.state}"
        )
    if counted is None or counted.state != known.state:
        return known
    return replace(
        known,
        by=counted.by,
        nodes=known.nodes or counted.nodes,
        exit_code=counted.exit_code if known.exit_code is None else known.exit_code,
    )


def _select(job: str, known: Mapping[str, JobInfo]) -> JobInfo:
    """The job of that id, or the tasks of the array of that id."""
    if info := known.get(job):
        return info
    return merge_array(job, (info for info in known.values() if info.job.startswith(f"{job}_")))
