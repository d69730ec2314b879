"""The starts of a run, one line each: who came when, where, and from which step on.

One rule: rank 0 appends, all read. A start is known by its id, so ranks that read before rank 0
has written count it themselves and come to the same number.
"""

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torchdistpackage.bounded import parse_json
from torchdistpackage.launch.requeue import RequeueLimits, restart_denied_reason
from torchdistpackage.launch.slurm.lines import read_lines
from torchdistpackage.launch.slurm.run_dir import RunDir, attempt_id


@dataclass(frozen=True, slots=True)
class Start:
    """One start of a job.

    start: its id. restart: how many starts the run had before. series: the submission that it and
        its requeues go back to. nodes: Slurm's host list. step: where it began.
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
        """How often the ranks had been started before in the same start of the job."""
        _, _, attempt = f"{self.start}.0.0".split(".")[:3]
        return int(attempt)


def in_job(starts: Iterable[Start]) -> int:
    """How many of `starts` came in the job of the one before, which was not requeued for them."""
    return sum(start.attempt > 0 for start in starts)


def read_starts(path: Path) -> list[Start]:
    """All starts in order; a line that a kill left unfinished is passed over.

    Raises:
        LaunchError: it is no file that can be read.
    """
    starts: dict[str, Start] = {}
    for line in read_lines(path):
        try:
            start = Start(**parse_json(line))
        except (ValueError, TypeError):
            continue
        starts[start.start] = start  # of one start the last line holds
    return list(starts.values())


def this_start(files: RunDir, env: Mapping[str, str], step: int) -> Start:
    """The start that this process belongs to, as noted or as it will be."""
    own, before = attempt_id(env), read_starts(files.starts)
    if noted := next((s for s in before if s.start == own), None):
        return noted
    job = env.get("SLURM_JOB_ID", "")
    return Start(
        own,
        len(before),
        env.get("TDP_SERIES") or job,
        job,
        time.time(),
        env.get("SLURM_JOB_NODELIST", ""),
        socket.gethostname(),
        step,
    )


def series_of(files: RunDir, start: Start) -> list[Start]:
    """The starts of the same submission up to `start`, which comes last."""
    before = (s for s in read_starts(files.starts) if s.start != start.start)
    return [*(s for s in before if s.series == start.series), start]


def restart_denied(files: RunDir, start: Start, limits: RequeueLimits) -> str:
    """Why this start, which Slurm made of itself, is not to train; "" if it is."""
    before = series_of(files, start)[:-1]
    why = restart_denied_reason(
        [s.step for s in before], start.step, limits, in_job([*before, start])
    )
    return why and (
        f"not started again at step {start.step}, which is saved: {why}; submit it again to go on, "
        f"the logs of its starts are in {files.logs}"
    )


def append(files: RunDir, start: Start) -> None:
    """Append the start, unless it is there as it is."""
    if start not in read_starts(files.starts):
        files.job.mkdir(parents=True, exist_ok=True)
        with files.starts.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(start)) + "\n")
            file.flush()
            os.fsync(file.fileno())


def amend(files: RunDir, env: Mapping[str, str], step: int) -> None:
    """Note where this start really began: a checkpoint may look complete and be damaged."""
    if own := next((s for s in read_starts(files.starts) if s.start == attempt_id(env)), None):
        append(files, replace(own, step=step))
