"""Ask Slurm for the states of jobs: its commands, its states, and what they mean.

A job is over only if a state of the table says so. A state that is not in it, or no answer, is
"unknown", and nothing is ever resubmitted or cancelled because of it.

The controller is right about what it knows. The accounting lags behind it by seconds (a job that is
being requeued is NODE_FAIL there), so it only adds to the controller's answer, and speaks for jobs
that the controller has forgotten. An answer is what stands on standard output after code 0: for an
id that it does not know squeue fails, as it does when it is not answered; of several it is silent,
so a single one is asked for twice.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from torchdistpackage.errors import LaunchError
from torchdistpackage.text import without_credentials

TIMEOUT_S = 60.0
"""Time limit of a command in seconds. A busy controller is slow; if it is away, the client waits
longer than this.
"""
GRACE_S = 60.0
"""Seconds after submission or the last sighting during which a job without a state is not given
up.
"""
_EARLIER_S = 3600.0
"""Seconds before the first submission from which the accounting is queried, because clocks
differ.
"""


_ERROR_LINES = 4
"""Largest number of lines shown of an error."""


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """A finished command: its exit code and output."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def why(self) -> str:
        """The error's relevant lines, else the first line; a site may print more around them.

        It goes into files and reports, so without passwords in addresses of a site's own tools.
        """
        text = without_credentials(self.err or self.out)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if errors := [line for line in lines if "error:" in line.lower()]:
            return "; ".join(dict.fromkeys(errors[:_ERROR_LINES]))
        return lines[0] if lines else f"exit code {self.code}"


Runner = Callable[..., CompletedCommand]
"""Runs a command (words, and env=) to its end; raises LaunchError only if it cannot be run."""


class CommandTimeout(LaunchError):
    """A command was given up; its request may nevertheless have taken effect."""


def run_command(
    args: Sequence[str], env: Mapping[str, str] | None = None, *, timeout_s: float | None = None
) -> CompletedCommand:
    """Run a command and wait for it, by default for TIMEOUT_S; any exit code is an answer.

    env: its entire environment; None: this process's, and times are written in seconds since 1970.

    Raises:
        LaunchError: there is no such command here, or it does not answer (`CommandTimeout`).
    """
    limit_s = TIMEOUT_S if timeout_s is None else timeout_s
    try:
        completed = subprocess.run(
            list(args),
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"} if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {args[0]} here; run this where Slurm's commands are, on a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise CommandTimeout(
            f"{' '.join(args[:3])} gave no answer in {limit_s:g} s; is the controller away? "
            f"see `scontrol ping`"
        ) from None
    return CompletedCommand(completed.returncode, completed.stdout, completed.stderr)


def job_id_of(text: str) -> str:
    """Return the id in the answer of `sbatch --parsable`, or "".

    A site's wrapper may print lines before and after it, or drop the option; on a site with several
    clusters `;cluster` follows the id.
    """
    ids = re.findall(r"^(?:Submitted batch job )?(\d+)(?:;.*| on cluster .*)?$", text, re.MULTILINE)
    return ids[-1] if ids else ""


def limited(total_s: float) -> Runner:
    """Return a runner whose commands together have `total_s` from now on."""
    until_s = time.monotonic() + total_s

    def run_within(args: Sequence[str], env: Mapping[str, str] | None = None) -> CompletedCommand:
        return run_command(args, env, timeout_s=max(until_s - time.monotonic(), 0.0))

    return run_within


def slurm_time(time_s: float) -> str:
    """Return a point in time in the form that Slurm's commands read."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time_s))


class Outcome(StrEnum):
    """The meaning of a job's state for a program that waits for the job."""

    ALIVE = "alive"  # it waits, runs, or will run again: leave it alone
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # it ended, and nobody asked it to
    CANCELLED = "cancelled"  # the user or an administrator ended it for good
    UNKNOWN = "unknown"  # Slurm does not know the job yet or any more, or we do not know the state


_STATES = {
    Outcome.ALIVE: (
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "COMPLETING",
        "SUSPENDED",
        "STOPPED",
        "REQUEUED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "SPECIAL_EXIT",
        "RESV_DEL_HOLD",
        "RESIZING",
        "SIGNALING",
        "STAGE_OUT",
        "POWER_UP_NODE",
        "UPDATE_DB",
        "EXPEDITING",
    ),
    Outcome.SUCCEEDED: ("COMPLETED",),
    Outcome.FAILED: (
        "FAILED",
        "TIMEOUT",
        "DEADLINE",
        "OUT_OF_MEMORY",
        "LAUNCH_FAILED",
        "RECONFIG_FAIL",
        "NODE_FAIL",
        "BOOT_FAIL",
        "PREEMPTED",
    ),
    Outcome.CANCELLED: ("CANCELLED", "REVOKED"),
}

OUTCOMES = {state: outcome for outcome, states in _STATES.items() for state in states}
"""Slurm's state -> its meaning. PREEMPTED is shown for a job that Slurm does not requeue."""

NOT_ITS_FAULT = frozenset({"NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "LAUNCH_FAILED"})
"""Ways to end that the job itself did not cause."""

SQUEUE_FIELDS = (
    "JobArrayID:40",
    "State:20",
    "RestartCnt:10",
    "exit_code:10",
    "TimeUsed:24",
    "NodeList:4000",
    "Reason:200",
)
"""Fields with widths, because squeue cuts a field without a width at 20 characters."""
SEPARATOR = "|"
SQUEUE = ("squeue", "-h", "-r", "-t", "all", "-O", ",".join(f + SEPARATOR for f in SQUEUE_FIELDS))
SACCT_FIELDS = ("JobID", "State", "ExitCode", "ElapsedRaw", "NodeList", "Reason")
SACCT = ("sacct", "-D", "-X", "-n", "-P", f"--delimiter={SEPARATOR}", "-o", ",".join(SACCT_FIELDS))


@dataclass(frozen=True, slots=True)
class JobInfo:
    """Slurm's information about a job, or about one task of an array.

    state: Slurm's word, "" if it has none. reason: why it waits or ended. nodes: Slurm's host list.
    exit_code: in a shell's form (128 + signal), None while unknown. restarts: None if nobody counts
    them. by: who cancelled it, if known.
    """

    job: str
    state: str = ""
    reason: str = ""
    nodes: str = ""
    exit_code: int | None = None
    restarts: int | None = None
    elapsed_s: float | None = None
    by: str = ""

    @property
    def outcome(self) -> Outcome:
        return OUTCOMES.get(self.state, Outcome.UNKNOWN)

    @property
    def ended(self) -> bool:
        """Return whether the job is over for good, successful or not."""
        return self.outcome in (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.CANCELLED)


def array_job_id(job: str) -> str:
    """Return the id under which a job is submitted: `123` for `123_4`, `123_[0-3%2]` and
    `123+1`.
    """
    return re.split(r"[_+]", job, maxsplit=1)[0]


def expand_array(job: str) -> tuple[str, ...]:
    """Return the ids behind an id of squeue or sacct: `7_[0-4:2,9%2]` means 7_0, 7_2, 7_4, 7_9.

    Waiting tasks of an array share a line. A list that Slurm truncated (`...`) gives the listed
    ones.
    """
    match = re.fullmatch(r"(\d+)_\[([^]]*)\]?", job)
    if match is None:
        return (job.removesuffix("+0"),)
    ids: list[str] = []
    for part in match[2].partition("%")[0].split(","):
        if span := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part):
            first, last, step = int(span[1]), int(span[2] or span[1]), int(span[3] or 1)
            ids += [f"{match[1]}_{task}" for task in range(first, last + 1, max(step, 1))]
    return tuple(ids)


def parse_squeue(text: str) -> dict[str, JobInfo]:
    """Parse the output of `SQUEUE`; lines of another shape are skipped."""
    jobs: dict[str, JobInfo] = {}
    for job, state, restarts, status, used, nodes, reason in _rows(text, len(SQUEUE_FIELDS)):
        # the kernel's status: the code in the upper byte, the signal in the lower
        code, signum = divmod(int(status) & 0xFFFF if status.isdigit() else 0, 256)
        info = JobInfo(
            job,
            state,
            "" if reason == "None" else reason,
            nodes,
            _exit_code(state, code, signum & 0x7F) if status.isdigit() else None,
            int(restarts) if restarts.isdigit() else None,
            seconds_of(used),
        )
        jobs |= {task: replace(info, job=task) for task in expand_array(job)}
    return jobs


def parse_sacct(text: str) -> dict[str, JobInfo]:
    """Parse the output of `SACCT`; lines of another form are skipped.

    A requeued job has one row for each start, in order: the last one counts.
    """
    jobs: dict[str, JobInfo] = {}
    for job, state, status, elapsed, nodes, reason in _rows(text, len(SACCT_FIELDS)):
        state_name, _, by = state.partition(" by ")
        pair = re.fullmatch(r"(\d+):(\d+)", status)  # code:signal
        info = JobInfo(
            job,
            state_name.partition(" ")[0],
            "" if reason == "None" else reason,
            "" if nodes == "None assigned" else nodes,
            _exit_code(state_name, int(pair[1]), int(pair[2])) if pair else None,
            0,
            float(elapsed) if elapsed.isdigit() else None,
            by,
        )
        for task in expand_array(job):
            earlier = jobs.get(task)
            restarts = 0 if earlier is None or earlier.restarts is None else earlier.restarts + 1
            jobs[task] = replace(info, job=task, restarts=restarts)
    return jobs


def merge_array(job: str, jobs: Iterable[JobInfo]) -> JobInfo:
    """Merge the tasks of an array into one: alive while one task is, then with the worst of their
    ends.
    """
    parts = sorted(jobs, key=lambda info: info.job)
    order = (Outcome.ALIVE, Outcome.UNKNOWN, Outcome.FAILED, Outcome.CANCELLED, Outcome.SUCCEEDED)
    worst = min(parts, key=lambda info: order.index(info.outcome), default=JobInfo(job))
    return replace(worst, job=job)


def _rows(text: str, num_fields: int) -> Iterable[list[str]]:
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(SEPARATOR)]
        if len(fields) == num_fields + 1 and not fields[-1]:  # squeue ends each field with one
            fields.pop()
        if len(fields) == num_fields and re.match(r"\d", fields[0]):
            yield fields


def seconds_of(text: str) -> float | None:
    """Return the seconds of `2-03:04:05`, `3:04:05` or `4:05`; None of another text."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _exit_code(state: str, code: int, signum: int) -> int | None:
    """Return the exit code in a shell's form; None for a job that is not over.

    A signal above 64 is not the kernel's: Slurm records 125 when a job ran out of memory.
    """
    if signum > 64 or OUTCOMES.get(state) is Outcome.ALIVE:
        return None
    return 128 + signum if signum else code


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Slurm's answer. jobs: every requested id. notes: queries that failed, with the reason."""

    jobs: Mapping[str, JobInfo]
    notes: tuple[str, ...] = ()


def query_jobs(
    ids: Sequence[str], runner: Runner = run_command, *, since_s: float | None = None
) -> QueryResult:
    """Return the states of jobs; a job that Slurm does not know (yet, or any more) has no state.

    ids: `123`, or `123_4` for a task of an array; `123` of an array means all its tasks. since_s:
    submission time of the earliest; it excludes older jobs with the same ids.

    Raises:
        LaunchError: the controller does not answer, so a job may be there all the same.
    """
    if not ids:
        return QueryResult({})
    joined_ids = _joined(ids)
    ran = runner([*SQUEUE, "-j", joined_ids if "," in joined_ids else f"{joined_ids},{joined_ids}"])
    if ran.code == 0:
        queued = parse_squeue(ran.out)
    elif (shown := _shown_by_scontrol(joined_ids, runner)) is not None:
        queued = shown
    else:
        raise LaunchError(f"squeue cannot say how jobs {_joined(ids)} are: {ran.why}")
    gone = [job for job in ids if _select(job, queued).outcome is not Outcome.ALIVE]
    if not gone:
        return QueryResult({job: _select(job, queued) for job in ids})
    try:
        counted, note = _accounting(gone, runner, since_s), ""
    except LaunchError as error:
        counted, note = {}, str(error)
    merged = {job: _merge(job, queued.get(job), counted.get(job)) for job in {**counted, **queued}}
    jobs = {job: _select(job, merged) for job in ids}
    missed = note and any(not info.state for info in jobs.values())
    return QueryResult(jobs, (note,) if missed else ())


def parse_scontrol(text: str) -> dict[str, JobInfo]:
    """Parse `scontrol --oneliner show job`: a line for each job or task of an array."""
    jobs: dict[str, JobInfo] = {}
    for line in text.splitlines():
        facts: dict[str, str] = {}
        for name, value in re.findall(r"(?<!\S)(\w+)=(\S*)", line):
            facts.setdefault(name, value)
        job, state = facts.get("JobId", ""), facts.get("JobState", "")
        if not job.isdigit():
            continue
        if "ArrayJobId" in facts and "ArrayTaskId" in facts:
            tasks = facts["ArrayTaskId"]
            job = f"{facts['ArrayJobId']}_{tasks if tasks.isdigit() else f'[{tasks}]'}"
        pair = re.fullmatch(r"(\d+):(\d+)", facts.get("ExitCode", ""))
        reason, restarts = facts.get("Reason", "None"), facts.get("Restarts", "")
        info = JobInfo(
            job,
            state,
            "" if reason == "None" else reason,
            facts.get("NodeList", "").replace("(null)", ""),
            _exit_code(state, int(pair[1]), int(pair[2])) if pair else None,
            int(restarts) if restarts.isdigit() else None,
            seconds_of(facts.get("RunTime", "")),
        )
        jobs |= {task: replace(info, job=task) for task in expand_array(job)}
    return jobs


def _shown_by_scontrol(joined_ids: str, runner: Runner) -> dict[str, JobInfo] | None:
    """Return the jobs from scontrol, for sites that refuse squeue; None if it does not answer
    either."""
    jobs: dict[str, JobInfo] = {}
    for job in joined_ids.split(","):
        try:
            ran = runner(["scontrol", "--oneliner", "show", "job", job])
        except LaunchError:
            return None
        if ran.code == 0:
            jobs |= parse_scontrol(ran.out)
        elif "invalid job id" not in ran.err.lower():
            return None
    return jobs


def _accounting(ids: Sequence[str], runner: Runner, since_s: float | None) -> dict[str, JobInfo]:
    since = [] if since_s is None else ["-S", slurm_time(since_s - _EARLIER_S)]
    ran = runner([*SACCT, "-j", _joined(ids), *since])
    if ran.code != 0:
        raise LaunchError(f"no word from the accounting: {ran.why}")
    return parse_sacct(ran.out)


def _joined(ids: Sequence[str]) -> str:
    return ",".join(dict.fromkeys(map(array_job_id, ids)))


def _merge(job: str, queued: JobInfo | None, counted: JobInfo | None) -> JobInfo:
    if queued is None:
        if counted is None or counted.ended:
            return counted or JobInfo(job)
        why = f"the controller does not know it, though sacct says {counted.state}"
        return JobInfo(job, reason=why)
    if counted is None or counted.state != queued.state:
        return queued
    return replace(
        queued,
        by=counted.by,
        nodes=queued.nodes or counted.nodes,
        exit_code=counted.exit_code if queued.exit_code is None else queued.exit_code,
    )


def _select(job: str, jobs: Mapping[str, JobInfo]) -> JobInfo:
    """Return the job with that id, or the tasks of the array with that id."""
    if info := jobs.get(job):
        return info
    return merge_array(job, (info for info in jobs.values() if info.job.startswith(f"{job}_")))
