"""Files of the hang watch: the dumps of ranks in a shared folder, and flags on each host. No torch.

In the shared folder every file that is polled is there from the beginning. Clients of a network
file system may believe for a minute that a file is missing, but look again at each opening of one
that they know. So a rank has one file from its start on, written anew each time, and a common file
is empty until it means something.
"""

import contextlib
import hashlib
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from torchdistpackage.files import atomic_write, make_folder, open_regular, own_folder
from torchdistpackage.harness.hang.packed import pack, unpack

_OPEN = os.O_RDWR | os.O_CREAT | os.O_APPEND


@dataclass(frozen=True, slots=True)
class Process:
    """A process of one host, identified by its start time too, because a pid may be reused.

    started: ticks since the host booted. space: the namespace of `pid`.
    """

    host: str
    pid: int
    started: str
    space: str

    @classmethod
    def mine(cls) -> "Process":
        pid = os.getpid()
        return cls(socket.gethostname(), pid, _stat(pid)[2], _space())

    def state(self) -> str | None:
        """Return a letter as in /proc (R, S, D, T, ...), "" if the process is gone; None if it is
        not visible from here.
        """
        if self.host != socket.gethostname() or self.space != _space():
            return None
        letter, _, started = _stat(self.pid)
        return letter if started == self.started and letter not in "ZX" else ""

    def descendants(self) -> list["Process"]:
        """Return the child processes, such as a loader's workers, and theirs; parents first."""
        children: dict[int, list[Process]] = {}
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):  # noqa: PTH208 - names
            letter, parent, started = _stat(pid)
            if letter not in "ZX":
                child = replace(self, pid=pid, started=started)
                children.setdefault(parent, []).append(child)
        processes = list(children.get(self.pid, ()) if self.state() else ())
        for process in processes:  # grows on the way
            processes += children.get(process.pid, ())
        return processes

    def kill(self) -> None:
        """Kill the process, if it is still the same one and may be killed by us."""
        if self.state():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)


class State(StrEnum):
    """The kind of a rank's last dump."""

    HERE = "here"  # it was training when it wrote this
    DUMPED = "dumped"  # it wrote what it does in the hang
    RAISED = "raised"  # an exception ended its loop
    LEFT = "left"  # its loop has ended


@dataclass(frozen=True, slots=True)
class Dump:
    """The state of a rank, which it writes to a file as JSON.

    step: number of steps it has begun; over_s: how long the last one has taken, of limit_s.
    snapshot: that of comm.flight_recorder. stacks: a text for each thread, the main one first.
    error: an environment.failure.Failure as JSON. neighbours: states of the other processes of its
    host (letters of /proc), by rank. failure: file in which its supervisor expects its failure.
    reports: whether it waits for the report before it ends. flights: calls that its device has not
    finished, None if not known (`more`: not known yet). network: what is wrong with the
    interface of its messages; "" if nothing is known.
    """

    rank: int
    state: State
    process: Process
    time_s: float
    step: int = 0
    over_s: float = 0.0
    snapshot: dict[str, Any] | None = None
    stacks: tuple[str, ...] = ()
    error: str = ""
    neighbours: dict[int, str] = field(default_factory=dict[int, str])
    failure: str | None = None
    reports: bool = False
    limit_s: float = 0.0
    flights: list[dict[str, Any]] | None = None
    more: bool = False
    network: str = ""

    @property
    def answers(self) -> bool:
        """Return whether the rank has written its last dump."""
        return self.state is not State.HERE


def from_json(text: str) -> Dump:
    """Read a dump from its text; raises ValueError, TypeError or KeyError if it is none."""
    fields = unpack(text)
    return Dump(
        **fields
        | {
            "state": State(fields["state"]),
            "process": Process(**fields["process"]),
            "stacks": tuple(fields["stacks"]),
            "neighbours": {int(rank): letter for rank, letter in fields["neighbours"].items()},
        }
    )


class Folder:
    """The files of one watch: `hang.<start>` in the folder that its ranks share.

    Writing methods raise OSError if the folder cannot be written.
    """

    def __init__(self, parent: Path, start: str) -> None:
        self.path = parent / f"hang.{start}"
        self.report = parent / f"hang.{start}.txt"
        self._alarm, self._reported = self.path / "alarm", self.path / "reported"
        self._hosts = self.path / "hosts"
        self._seen: dict[int, tuple[object, Dump]] = {}

    def make(self) -> None:
        """Make the folder, with the files that all ranks share."""
        make_folder(self.path, mode=0o700)
        for common in (self._alarm, self._reported):
            os.close(open_regular(common, _OPEN, 0o600))

    def open(self, dump: Dump) -> int:
        """Create missing files and this rank's file; return a descriptor for its stacks."""
        self.make()
        self.write(dump)
        return open_regular(self.stacks_of(dump), _OPEN | os.O_TRUNC, 0o600)

    def stacks_of(self, dump: Dump) -> Path:
        """Return the file to which the C side of a rank writes its stacks."""
        return self._of(dump).with_suffix(".stacks")

    def write(self, dump: Dump) -> None:
        atomic_write(self._of(dump), pack(asdict(dump)))
        # by host, so that its ranks find each other without a look at all
        beside = self._hosts / dump.process.host
        make_folder(beside, mode=0o700)  # a rank of another node may have made `hosts` just now
        (beside / str(dump.rank)).touch(mode=0o600)

    def read(self, ranks: Iterable[int] | None = None) -> dict[int, Dump]:
        """Return the dumps of ranks (default: all that wrote one), without unreadable ones."""
        dumps = dict[int, Dump]()
        for rank in sorted(self._paths()) if ranks is None else ranks:
            # a Path for each of thousands takes longer than what is in them
            name = f"{self.path}/rank{rank}.dump"
            with (
                contextlib.suppress(ValueError, TypeError, KeyError, OSError),
                open(name, encoding="utf-8") as file,  # noqa: PTH123
            ):
                # opened each time, so that a network file system looks again; what it found
                # before is as it was, as a dump is replaced as a whole
                at = os.fstat(file.fileno())
                version = at.st_ino, at.st_mtime_ns, at.st_size
                seen = self._seen.get(rank)
                if seen is None or seen[0] != version:
                    self._seen[rank] = seen = version, from_json(file.read())
                dumps[rank] = seen[1]
        return dumps

    def read_host(self, host: str) -> dict[int, Dump]:
        """Return the dumps of the ranks of one host."""
        with contextlib.suppress(OSError):
            names = os.listdir(self._hosts / host)  # noqa: PTH208 - names are all that is needed
            return self.read(sorted(map(int, filter(str.isdigit, names))))
        return {}

    def num_reporting(self, *, below: int) -> int:
        """Return how many lower ranks wait for the report or write it, counted up to 3.

        No rank lists the folder to find out, because thousands of ranks would list millions of
        names.
        """
        num = 0
        for rank in range(below):
            if num == 3:
                break
            dump = self.read([rank]).get(rank)
            num += dump is not None and dump.reports
        return num

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Read the dumps that torch's C++ side left for silent ranks."""
        texts = dict[int, str]()
        for rank in ranks:
            with contextlib.suppress(OSError):
                text = self._path(rank).with_suffix(".stacks").read_text(encoding="utf-8")
                texts |= {rank: text} if text else {}
        return texts

    def raise_alarm(self) -> None:
        _append(self._alarm)

    @property
    def has_alarm(self) -> bool:
        return _is_marked(self._alarm)

    def write_report(self, text: str) -> None:
        atomic_write(self.report, text + "\n", mode=0o600)
        _append(self._reported)

    @property
    def has_report(self) -> bool:
        return _is_marked(self._reported)

    def remove_if_all_left(self, world_size: int) -> None:
        """Remove everything when the last rank has ended successfully."""
        for rank in reversed(range(world_size)):
            last = self.read([rank]).get(rank)
            if last is None or last.state is not State.LEFT:
                return
        shutil.rmtree(self.path, ignore_errors=True)

    def _of(self, dump: Dump) -> Path:
        return self._path(dump.rank)

    def _path(self, rank: int) -> Path:
        return self.path / f"rank{rank}.dump"

    def _paths(self) -> dict[int, Path]:
        with contextlib.suppress(OSError):
            return {
                int(name.removeprefix("rank").removesuffix(".dump")): self.path / name
                for name in os.listdir(self.path)  # noqa: PTH208 - a name is all that is needed
                if name.startswith("rank") and name.endswith(".dump")
            }
        return {}


class Nearby:
    """A folder on the host's own disk through which its ranks share the polling of `shared`.

    One rank of the host looks into `shared` every `every_s` for all of them. No rank is in charge:
    the first one to see that nobody has looked for a while looks, and notes that it did, and so
    replaces a rank that is stopped or gone. Without a private folder each rank looks by itself.
    """

    def __init__(self, shared: Path, every_s: float) -> None:
        self._every_s = every_s
        name = hashlib.sha256(f"{socket.gethostname()}\0{shared}".encode()).hexdigest()[:16]
        folder = own_folder()
        self._looked = folder and folder / f"{name}.looked"
        self._alarm = folder and folder / f"{name}.alarm"

    def is_due(self) -> bool:
        """Return whether this rank must look now; if so, the other ranks rely on it."""
        if self._looked is None:
            return True
        try:
            # a clock that was put back must not keep everybody from looking
            if abs(time.time() - self._looked.stat().st_mtime) < self._every_s:
                return False
            os.utime(self._looked)
        except FileNotFoundError:
            return _make(self._looked)
        except OSError:
            pass
        return True

    @property
    def has_alarm(self) -> bool:
        return self._alarm is not None and self._alarm.exists()

    def raise_alarm(self) -> None:
        if self._alarm is not None:
            _make(self._alarm)

    def leave(self) -> None:
        """Remove the existing files; ranks that stay create them again."""
        for path in (self._looked, self._alarm):
            if path is not None:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)


def remove_traces(parent: Path) -> None:
    """Remove the files that watches of earlier starts have left in `parent`; their reports stay."""
    for path in parent.glob("hang.*/"):
        shutil.rmtree(path, ignore_errors=True)


def states(dumps: Mapping[int, Dump]) -> dict[int, str]:
    """Return the state letter of each rank's process, as ranks of the same host saw it."""
    return {rank: letter for dump in dumps.values() for rank, letter in dump.neighbours.items()}


def _append(path: Path) -> None:
    with os.fdopen(open_regular(path, _OPEN), "ab", buffering=0) as file:
        file.write(b"1\n")
        os.fsync(file.fileno())


def _is_marked(path: Path) -> bool:
    """Return whether the file has content.

    It is opened, because a network file system looks again only at an open, not at a stat.
    """
    with contextlib.suppress(OSError), path.open("rb") as file:
        return bool(file.read(1))
    return False


def _stat(pid: int) -> tuple[str, int, str]:
    """Return (state, parent, start time) of a process of this host; ("X", 0, "") if there is
    none.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return "X", 0, ""
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), fields[19]


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - the text, which is not a path
    except OSError:
        return ""


def _make(path: Path) -> bool:
    """Create a file; return False if another process created it first."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:
        pass
    return True
