"""A process of one host, and those that it has started. No torch.

One rule: a pid alone names nobody. It may have come again, or be a number of another namespace, so
a process is known by its start as well, which is compared again before it is ended.
"""

import contextlib
import os
import signal
import socket
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """started: ticks since the host booted. space: the namespace that `pid` is a number of."""

    host: str
    pid: int
    started: str
    space: str

    @classmethod
    def mine(cls) -> "Process":
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _stat(pid)[2], _space())

    def state(self) -> str | None:
        """A letter as in /proc (R, S, D, T, ...), "" if it is gone; None: cannot be seen here."""
        if self.host != socket.gethostname() or self.space != _space():
            return None
        letter, _, started = _stat(self.pid)
        return letter if started == self.started and letter not in "ZX" else ""

    def descendants(self) -> list["Process"]:
        """What it has started, as the workers of a loader, and what those have; parents first."""
        children: dict[int, list[Process]] = {}
        for name in os.listdir("/proc"):  # noqa: PTH208 - a name is all that is needed
            if name.isdigit():
                letter, parent, started = _stat(int(name))
                if letter not in "ZX":
                    child = replace(self, pid=int(name), started=started)
                    children.setdefault(parent, []).append(child)
        found = list(children.get(self.pid, ()) if self.state() else ())
        for process in found:  # grows on the way
            found += children.get(process.pid, ())
        return found

    def kill(self) -> None:
        """End it, if it is still the same one and may be ended by us."""
        if self.state():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


def _stat(pid: int) -> tuple[str, int, str]:
    """(state, parent, start time) of a process of this host; ("X", 0, "") if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return "X", 0, ""
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), fields[19]


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - the text, which is no path
    except OSError:
        return ""
