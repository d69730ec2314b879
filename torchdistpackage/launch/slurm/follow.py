"""Reads logs while they are written, over all starts of a run, until its job is over.

One rule: a log only grows, and a restart with a file of its own comes after the one before, so what
was passed on once is never passed on again.
"""

import codecs
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchdistpackage.bounded import check_regular
from torchdistpackage.errors import ConfigError, LaunchError
from torchdistpackage.launch.slurm.query import Outcome, Runner, query_jobs, run_command
from torchdistpackage.launch.slurm.runs import Status, SubmittedRun, read_run, status

_POLL_S = 0.5
_ASK_S = 5.0
"""Slurm is asked seldom: every question costs its controller something."""


def rank_logs(run: SubmittedRun, rank: int, restart: int | None = None) -> list[Path]:
    """The logs of a rank, the earliest start first.

    Raises:
        ConfigError: there is none; the text says which there are.
    """
    logs = run.files.logs
    found = sorted(logs.glob(f"rank{rank}.restart*.log"), key=_restart)
    found = [path for path in found if restart is None or _restart(path) == restart]
    if not found:
        there = ", ".join(sorted(path.name for path in logs.glob("*.log"))) or "no log at all"
        which = "" if restart is None else f" of restart {restart}"
        raise ConfigError(f"rank {rank} has no log{which} in {logs}; there is {there}")
    return found


def _restart(path: Path) -> int:
    number = path.name.removesuffix(".log").rpartition("restart")[2]
    return int(number) if number.isdigit() else -1


@dataclass(slots=True)
class LogTail:
    """What several files hold together, each read once. read_bytes: where to begin, if not at 0.

    A character of which only a part is written is passed on when the rest is.
    """

    read_bytes: dict[Path, int] = field(default_factory=dict[Path, int])
    _cut: dict[Path, bytes] = field(default_factory=dict[Path, bytes])

    def read_new(self, paths: Sequence[Path]) -> str:
        """What was added to `paths` since the last call, in their order."""
        parts: list[str] = []
        for path in paths:
            at = self.read_bytes.get(path, 0)
            try:
                check_regular(path.resolve())
                with path.open("rb") as file:
                    if at > file.seek(0, 2):  # a shorter one is a new file
                        at = 0
                        self._cut.pop(path, None)
                    file.seek(at)
                    data = file.read()
            except OSError:
                continue
            self.read_bytes[path] = at + len(data)
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            parts.append(decoder.decode(self._cut.pop(path, b"") + data))
            if rest := decoder.getstate()[0]:
                self._cut[path] = rest
        return "".join(parts)


def follow(
    run: SubmittedRun,
    paths: Callable[[], Sequence[Path]],
    write: Callable[[str], object],
    *,
    tail: LogTail | None = None,
    runner: Runner = run_command,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], object] = time.sleep,
) -> Status:
    """Pass on what is in `paths()` and what is added to it, until the run's latest job is over.

    tail: what it has read is not passed on. A requeue is no end, and neither is a job that was
    chained behind this one. While the controller does not answer, the logs go on being read.
    """
    tail, asked_s = tail or LogTail(), float("-inf")
    while True:
        ended = None
        if clock() - asked_s >= _ASK_S:
            asked_s = clock()
            ended = _ended(run.folder, runner, asked_s)
        if text := tail.read_new(paths()):  # after the question: what an ended job wrote is there
            write(text)
        if ended is not None:
            return ended
        sleep(_POLL_S)


def _ended(folder: Path, runner: Runner, now_s: float) -> Status | None:
    """How the latest job ended; None while it may go on."""
    run = read_run(folder)
    if run is None:
        return None
    job = run.latest.job
    try:
        info = query_jobs([job], runner, since_s=run.latest.time_s).jobs[job]
    except LaunchError:
        return None
    found = status(run, info, now_s)
    chained = read_run(folder) != run  # just before it ended
    return None if chained or found.outcome is Outcome.ALIVE else found
