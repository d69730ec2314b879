"""Daemons of one instance: start, look at, stop.

The one rule: only a recorded process is ever signalled, and a record is a process id with the
process's start time, so a number that the kernel gave to someone else since is left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from slurm.instance import Failed, Instance

# The process writes its own record before it becomes the daemon: no moment without one.
_RECORD = 'echo "$$ $(cut -d" " -f22 /proc/$$/stat)" >"$0"; exec "$@"'


def record_path(instance: Instance, name: str) -> Path:
    return instance.folder / "run" / f"{name}.pid"


def start(instance: Instance, name: str, command: list[str]) -> None:
    """Start a daemon in its own session, what it prints going to log/NAME.out."""
    record = record_path(instance, name)
    record.unlink(missing_ok=True)
    with (instance.folder / "log" / f"{name}.out").open("ab") as out:
        child = subprocess.Popen(
            ["sh", "-c", _RECORD, str(record), *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=instance.env(),
            cwd="/",
            start_new_session=True,
        )
    wait_until(lambda: pid_of(instance, name) or child.poll() is not None, 30, f"start of {name}")
    # It outlives us: nobody is to wait for it.
    child.returncode = 0


def pid_of(instance: Instance, name: str) -> int | None:
    """The process id of a daemon that runs, else None."""
    try:
        pid, start_time = map(int, record_path(instance, name).read_text().split())
    except (OSError, ValueError):
        return None
    return pid if _start_time(pid) == start_time else None


def stop(instance: Instance, name: str, *, term: bool = True) -> None:
    """End a daemon, politely for at most 5 s, and forget it."""
    for number in (signal.SIGTERM, signal.SIGKILL) if term else (signal.SIGKILL,):
        if pid := pid_of(instance, name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            with contextlib.suppress(Failed):
                wait_until(lambda: not pid_of(instance, name), 5, name)
    if pid := pid_of(instance, name):
        raise Failed(f"{name} (process {pid}) does not end")
    record_path(instance, name).unlink(missing_ok=True)


def init_pid(instance: Instance, node: str) -> int | None:
    """Process 1 of a node, as seen from here."""
    pid = pid_of(instance, node)
    children = _children(pid) if pid else []
    return children[0] if children else None


def slurmd_pid(instance: Instance, node: str) -> int | None:
    init = init_pid(instance, node)
    for pid in _children(init) if init else []:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "slurmd" and _start_time(pid):
                return pid
    return None


def wait_until(condition: Callable[[], object], limit_s: float, what: str) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            raise Failed(f"{what} did not happen within {limit_s:g} s")
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process that lives; a zombie does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
