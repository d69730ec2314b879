"""The submissions and starts of a run, one line each in its folder.

Files of a job start carry that start's id, so files of an earlier start do not count for this one.
Lines are only appended: submissions by whatever called sbatch (`tdp submit`, or the batch script
that chains a job after its own), starts by rank 0.
"""

import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from torchdistpackage.files import append_json, read_json_lines
from torchdistpackage.run_files import RunDir


def attempt_id(env: Mapping[str, str]) -> str:
    """Return `<job id>.<restart count>` of the Slurm job in `env`; "local" outside of one.

    A requeued job keeps its id, and Slurm counts its restarts; the tasks of an array have their own
    ids. If the batch script restarts the ranks, their number follows: `7.0.1`. A batch script can
    build the same name.
    """
    job, attempt = env.get("SLURM_JOB_ID"), env.get("TDP_ATTEMPT", "0")
    start = f"{job}.{env.get('SLURM_RESTART_COUNT') or 0}" if job else "local"
    return f"{start}.{attempt}" if job and attempt != "0" else start


@dataclass(frozen=True, slots=True)
class Submission:
    """One submission.

    job: Slurm's id, `123`, or `123_4` for a task of an array. time_s: seconds since 1970. via:
    "sbatch" or "submitit". script: sbatch's argument to submit this run again. code: the snapshot.
    nodes: the requested number. host: where it was submitted.
    """

    job: str
    time_s: float
    via: str
    script: str
    code: str
    nodes: str
    host: str


def append_record(path: Path, record: Submission) -> None:
    """Append a submission, making its folder if missing."""
    append_json(path, asdict(record))


def read_records(path: Path) -> tuple[Submission, ...]:
    """Return all submissions in order.

    Raises:
        LaunchError: it is not a file that can be read.
    """

    def parse(values: Any) -> Submission:  # of a later version too, which may have more fields
        return Submission(**{field.name: values[field.name] for field in fields(Submission)})

    return tuple(read_json_lines(path, parse)[0])


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a job. Ranks that read before rank 0 has written compute the same start.

    start: its id. restart: how many starts the run had before. series: the submission that it and
        its requeues go back to. nodes: host list of the step that
        runs the ranks, of the job where srun did not start them. step: where it began.
    """

    start: str
    restart: int
    series: str
    job: str
    time_s: float
    nodes: str
    host: str
    step: int

    @property
    def attempt(self) -> int:
        """Return the number of the restart within this start of the job; 0 for the first."""
        _, _, attempt = f"{self.start}.0.0".split(".")[:3]
        return int(attempt)


def in_job(starts: Iterable[Start]) -> int:
    """Return how many of `starts` were restarts within a job, without a requeue."""
    return sum(start.attempt > 0 for start in starts)


def read_starts(path: Path) -> list[Start]:
    """Return all starts in order.

    Raises:
        LaunchError: it is not a file that can be read.
    """
    starts, _ = read_json_lines(path, lambda values: Start(**values))
    return list({start.start: start for start in starts}.values())  # the last line of one holds


def this_start(files: RunDir, env: Mapping[str, str], step: int) -> Start:
    """Return the start that this process belongs to, as recorded or as it will be."""
    attempt, earlier = attempt_id(env), read_starts(files.starts)
    if noted := next((s for s in earlier if s.start == attempt), None):
        return noted
    job = env.get("SLURM_JOB_ID", "")
    return Start(
        attempt,
        len(earlier),
        env.get("TDP_SERIES") or job,
        job,
        time.time(),
        # of ranks that srun started: a job that has lost a node still says it had it
        env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""),
        socket.gethostname(),
        step,
    )


def series_of(files: RunDir, start: Start) -> list[Start]:
    """Return the starts of the same submission up to `start`, which comes last."""
    earlier = (s for s in read_starts(files.starts) if s.start != start.start)
    return [*(s for s in earlier if s.series == start.series), start]


def append_start(files: RunDir, start: Start) -> None:
    """Append the start unless the file already has it."""
    if start not in read_starts(files.starts):
        append_json(files.starts, asdict(start))


def amend_start(files: RunDir, env: Mapping[str, str], step: int) -> None:
    """Correct where this start really began: a checkpoint may look complete and be damaged."""
    if start := next((s for s in read_starts(files.starts) if s.start == attempt_id(env)), None):
        append_start(files, replace(start, step=step))
