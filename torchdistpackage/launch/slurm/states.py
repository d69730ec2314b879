"""Slurm's words for the state of a job, and what squeue and sacct write about jobs.

One rule: a job is dead only when a word of the table says so. A word that is not in it, or no
answer at all, is "unknown", and nothing is ever resubmitted or cancelled because of it.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum


class Outcome(StrEnum):
    """What a state means for who waits for the job."""

    ALIVE = "alive"  # waits, runs, or will run again: hands off
    SUCCEEDED = "succeeded"
    FAILED = "failed"  # died of something that was not anybody's wish
    CANCELLED = "cancelled"  # ended by the user or an administrator, and that is final
    UNKNOWN = "unknown"  # Slurm does not know the job, yet or any more, or we not the word


_STATES = {
    Outcome.ALIVE: (
        *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED"),
        *("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
        *("RESIZING", "SIGNALING", "STAGE_OUT", "POWER_UP_NODE", "UPDATE_DB", "EXPEDITING"),
    ),
    Outcome.SUCCEEDED: ("COMPLETED",),
    Outcome.FAILED: (
        *("FAILED", "TIMEOUT", "DEADLINE", "OUT_OF_MEMORY", "LAUNCH_FAILED", "RECONFIG_FAIL"),
        *("NODE_FAIL", "BOOT_FAIL", "PREEMPTED"),
    ),
    Outcome.CANCELLED: ("CANCELLED", "REVOKED"),
}

OUTCOMES = {state: fate for fate, states in _STATES.items() for state in states}
"""Slurm's word -> what it means. PREEMPTED is shown for a job that Slurm does not requeue."""

NOT_ITS_FAULT = frozenset({"NODE_FAIL", "BOOT_FAIL", "PREEMPTED", "LAUNCH_FAILED"})
"""Ways to die that tell nothing about the job itself."""

SQUEUE_FIELDS = (
    *("JobArrayID:40", "State:20", "RestartCnt:10", "exit_code:10", "TimeUsed:24"),
    *("NodeList:4000", "Reason:200"),
)
"""With widths, as squeue cuts a field that has none at 20 characters."""
SEPARATOR = "|"
SQUEUE = ("squeue", "-h", "-r", "-t", "all", "-O", ",".join(f + SEPARATOR for f in SQUEUE_FIELDS))
SACCT_FIELDS = ("JobID", "State", "ExitCode", "ElapsedRaw", "NodeList", "Reason")
SACCT = ("sacct", "-D", "-X", "-n", "-P", f"--delimiter={SEPARATOR}", "-o", ",".join(SACCT_FIELDS))


@dataclass(frozen=True, slots=True)
class JobInfo:
    """What Slurm says about a job, or one task of an array.

    state: Slurm's word, "" if it has none. reason: why it waits, or why it ended. nodes: Slurm's
        host list. exit_code: as a shell would say it (128 and the signal), None while it is not
        known. restarts: None where nobody counts them. by: who cancelled it, if that is known.
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
        """Whether it is over for good, one way or the other."""
        return self.outcome in (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.CANCELLED)


def array_job_id(job: str) -> str:
    """The id that a job is submitted under: `123` of `123_4`, `123_[0-3%2]` and `123+1`."""
    return re.split(r"[_+]", job, maxsplit=1)[0]


def expand_array(job: str) -> tuple[str, ...]:
    """The ids that an id of squeue or sacct stands for: `7_[0-4:2,9%2]` is 7_0, 7_2, 7_4, 7_9.

    Work tasks of an array share a line. A list that Slurm cut short (`...`) gives what is there.
    """
    match = re.fullmatch(r"(\d+)_\[([^]]*)\]?", job)
    if match is None:
        return (job.removesuffix("+0"),)
    found: list[str] = []
    for part in match[2].partition("%")[0].split(","):
        if span := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part):
            first, last, step = int(span[1]), int(span[2] or span[1]), int(span[3] or 1)
            found += [f"{match[1]}_{task}" for task in range(first, last + 1, max(step, 1))]
    return tuple(found)


def parse_squeue(text: str) -> dict[str, JobInfo]:
    """What squeue wrote, called as `SQUEUE`; lines of another shape are passed over."""
    jobs: dict[str, JobInfo] = {}
    for job, state, restarts, status, used, nodes, reason in _rows(text, len(SQUEUE_FIELDS)):
        info = JobInfo(
            job,
            state,
            "" if reason == "None" else reason,
            nodes,
            _of_status(status) if OUTCOMES.get(state) is not Outcome.ALIVE else None,
            int(restarts) if restarts.isdigit() else None,
            _seconds(used),
        )
        jobs |= {task: replace(info, job=task) for task in expand_array(job)}
    return jobs


def parse_sacct(text: str) -> dict[str, JobInfo]:
    """What sacct wrote, called as `SACCT`; lines of another shape are passed over.

    A job that was requeued has a row for each start, in order: the last one counts.
    """
    jobs: dict[str, JobInfo] = {}
    for job, state, code, elapsed, nodes, reason in _rows(text, len(SACCT_FIELDS)):
        word, _, by = state.partition(" by ")
        info = JobInfo(
            job,
            word.partition(" ")[0],
            "" if reason == "None" else reason,
            "" if nodes == "None assigned" else nodes,
            _of_pair(code) if OUTCOMES.get(word) is not Outcome.ALIVE else None,
            0,
            float(elapsed) if elapsed.isdigit() else None,
            by,
        )
        for task in expand_array(job):
            before = jobs.get(task)
            restarts = 0 if before is None or before.restarts is None else before.restarts + 1
            jobs[task] = replace(info, job=task, restarts=restarts)
    return jobs


def merge_array(job: str, jobs: Iterable[JobInfo]) -> JobInfo:
    """The tasks of an array as one: alive while one is; then the worst of how they ended."""
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


def _seconds(text: str) -> float | None:
    """`2-03:04:05`, `3:04:05` or `4:05`."""
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _of_status(text: str) -> int | None:
    """squeue gives what the kernel gives: the code in the upper byte, the signal in the lower."""
    if not text.isdigit():
        return None
    code, signum = divmod(int(text) & 0xFFFF, 256)
    return _as_shell(code, signum & 0x7F)


def _of_pair(text: str) -> int | None:
    """sacct gives `code:signal`."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        return None
    return _as_shell(int(match[1]), int(match[2]))


def _as_shell(code: int, signum: int) -> int | None:
    if signum > 64:  # none of the kernel's: Slurm notes 125 where memory ran out
        return None
    return 128 + signum if signum else code
