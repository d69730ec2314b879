"""Estimate when nodes could start, from Slurm's list of nodes and its queue.

Nodes are idle now, come free when a running job ends, and are taken when a waiting job starts. A
new job delays none of these, so it starts at the first moment from which on its nodes stay free for
the job's time. The answer is an estimate: jobs end early, and others come before.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from math import inf

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.slurm.query import SEPARATOR, Runner, run_command, seconds_of

SINFO = ("sinfo", "-h", "-N", "-o", SEPARATOR.join(("%N", "%P", "%t")))
RUNNING = ("squeue", "-h", "-t", "R,CG", "-o", SEPARATOR.join(("%P", "%D", "%e")))
WAITING = ("squeue", "-h", "--start", "-o", SEPARATOR.join(("%P", "%D", "%S", "%l")))
"""Command that lists waiting jobs, with times in seconds since 1970."""
_IDLE = re.compile(r"(idle|plnd)[~#%]*")
"""States of available nodes: idle, powered up on demand, or reserved for a job that `WAITING`
lists."""
_GONE = re.compile(r"(down|drain|drng|fail|maint|unk|no_?resp|inval|resv)|.*\*")


@dataclass(frozen=True, slots=True)
class QueueState:
    """Nodes of one partition. total: nodes that can run jobs. idle: those without a job. changes:
    (seconds since 1970, nodes that become free, or negative if they are taken).
    """

    partition: str
    total: int
    idle: int
    changes: tuple[tuple[float, int], ...]

    def start_s(self, nodes: int, now_s: float, limit_s: float = inf) -> float | None:
        """Return when `nodes` nodes are free for `limit_s` seconds, or None if never."""
        if nodes > self.total:
            return None
        free, start = self.idle, now_s if self.idle >= nodes else None
        by_time = groupby(sorted(self.changes), key=lambda change: change[0])
        for time_s, changes in by_time:
            if start is not None and start + limit_s <= time_s:
                return start
            free += sum(number for _, number in changes)
            if free < nodes:
                start = None
            elif start is None:
                start = max(time_s, now_s)
        return start


def query_queue(partition: str | None = None, runner: Runner = run_command) -> QueueState:
    """Ask Slurm for the nodes and jobs of a partition; None means the default one.

    Raises:
        LaunchError: Slurm does not answer, or has no such partition.
    """
    nodes = _rows(_out(SINFO, runner), 3)
    named = {row[1].removesuffix("*") for row in nodes}
    default = next((row[1].removesuffix("*") for row in nodes if row[1].endswith("*")), None)
    name = partition or default
    if name is None or name not in named:
        have = ", ".join(sorted(named)) or "none"
        raise LaunchError(
            f"sinfo knows no partition {name}; its partitions are {have}: set "
            f"launch.slurm.partition to one of them"
        )
    states = {row[0]: row[2] for row in nodes if row[1].removesuffix("*") == name}
    present = [state for state in states.values() if not _GONE.match(state)]
    changes: list[tuple[float, int]] = []
    for of, number, end in _rows(_out(RUNNING, runner), 3):
        if of == name and number.isdigit() and (end_s := _time(end)) is not None:
            changes.append((end_s, int(number)))
    for of, number, start, limit in _rows(_out(WAITING, runner), 4):
        if name in of.split(",") and number.isdigit() and (start_s := _time(start)) is not None:
            changes.append((start_s, -int(number)))
            if (limit_s := seconds_of(limit)) is not None:
                changes.append((start_s + limit_s, int(number)))
    idle = sum(bool(_IDLE.fullmatch(state)) for state in present)
    return QueueState(name, len(present), idle, tuple(changes))


def _out(command: Iterable[str], runner: Runner) -> str:
    args = [*command]
    ran = runner(args)
    if ran.code != 0:
        raise LaunchError(f"{args[0]} does not say how the queue is: {ran.why}")
    return ran.out


def _rows(text: str, num_fields: int) -> list[list[str]]:
    rows = ([x.strip() for x in line.split(SEPARATOR)] for line in text.splitlines())
    return [row for row in rows if len(row) == num_fields]


def _time(text: str) -> float | None:
    return float(text) if text.isdigit() else None
