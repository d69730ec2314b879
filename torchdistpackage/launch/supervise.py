"""A rank that a launcher started, watched by a process of its own: this one forks it and waits.

A rank cannot say that it was killed, and a launcher only says that something ended. One rule: the
parent imports nothing that can break (no torch), so it is there when the rank is not, and leaves
one report per rank that failed, which says how.

The parent's output is the launcher's: all that rank 0 writes, and of the others what they failed
of. Every rank's own output goes to a log of its own.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.durable import write_whole
from torchdistpackage.launch.failure import (
    Failure,
    Kind,
    from_exception,
    from_json,
    how,
    is_consequence,
    to_json,
)
from torchdistpackage.launch.local import tail
from torchdistpackage.launch.signals import Noted

GRACE_S = 2.0
"""For a rank to end by itself when another one has failed and this process is told to end."""
_POLL_S = 0.25
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Place:
    """What is watched: rank, its log, and the folder for reports of this start."""

    rank: int
    log: Path
    failures: Path

    @property
    def report(self) -> Path:
        return self.failures / f"rank{self.rank}.json"


def supervise(body: Callable[[], int], place: Place, noted: Noted) -> int:
    """Run `body` in a fork of this process; its exit code, 128 and the signal's number if killed.

    `noted` listens already, and its handlers are the rank's too. What arrives here is passed on.

    Raises:
        LaunchError: this process has threads, so it must not fork.
    """
    if (num := len(list(Path("/proc/self/task").iterdir()))) > 1:
        raise LaunchError(
            f"this process has {num} threads ({[t.name for t in threading.enumerate()]}), and such "
            f"a process must not fork a rank; start `tdp train` as a program of its own"
        )
    place.log.parent.mkdir(parents=True, exist_ok=True)
    for stream in (sys.stdout, sys.stderr):  # or both processes would write it
        stream.flush()
    parent = os.getpid()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        _be_the_rank(body, place, write, parent)
    os.close(write)
    start_bytes = place.log.stat().st_size if place.log.exists() else 0
    watch = _Watch(place, noted, pid, start_bytes)
    with place.log.open("ab", buffering=0) as log, os.fdopen(read, "rb", 0) as output:
        os.set_blocking(output.fileno(), False)
        return watch.until_gone(output.fileno(), log.fileno())


def read_failures(folder: Path) -> list[Failure]:
    """The reports of one start by rank; those cut short are left out."""
    found: list[Failure] = []
    for path in sorted(folder.glob("rank*.json")):
        with contextlib.suppress(ValueError, TypeError, KeyError, OSError):
            found.append(from_json(path.read_text(encoding="utf-8")))
    return sorted(found, key=lambda failure: failure.rank)


def _be_the_rank(body: Callable[[], int], place: Place, out: int, parent: int) -> NoReturn:
    """The forked process, up to its end."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the line above
            os._exit(code)
        for fd in (1, 2):
            os.dup2(out, fd)
        os.close(out)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False) for fd in (1, 2))
        code = _ending(body, place)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        # Not sys.exit: after a failure it would wait for native threads that wait for peers.
        os._exit(code & 0xFF)


def _ending(body: Callable[[], int], place: Place) -> int:
    """The exit code of `body`, whose failure is reported first."""
    try:
        return body()
    except SystemExit as end:
        return _report(place, end) if end.code not in (None, 0) else 0
    except BaseException as error:
        traceback.print_exc()
        return _report(place, error)


def _report(place: Place, error: BaseException) -> int:
    failure = from_exception(place.rank, socket.gethostname(), os.getpid(), time.time(), error)
    write_whole(place.report, to_json(failure))
    return failure.exit_code or 1


class _Watch:
    """The parent: copies output, passes signals on, ends a rank whose peers are gone."""

    def __init__(self, place: Place, noted: Noted, pid: int, start_bytes: int) -> None:
        self._place, self._noted, self._pid = place, noted, pid
        self._start_bytes = start_bytes
        self._num_passed = len(noted.received)
        self._kill_s = float("inf")
        self._ended_by_us = False

    def until_gone(self, output: int, log: int) -> int:
        status = None
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while status is None:
                selector.select(_POLL_S)
                if not self._copy(output, log) and selector.get_map():
                    selector.unregister(output)
                    time.sleep(_POLL_S / 10)
                self._look_around()
                pid, raw = os.waitpid(self._pid, os.WNOHANG)
                status = os.waitstatus_to_exitcode(raw) if pid else None
            self._copy(output, log)
        return self._last_words(status)

    def _copy(self, output: int, log: int) -> bool:
        """Copy what is there; False when there will be no more."""
        while True:
            try:
                data = os.read(output, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            os.write(log, data)
            if self._place.rank == 0:
                _write_all(1, data)

    def _look_around(self) -> None:
        received = self._noted.received
        while self._num_passed < len(received):
            self._kill(received[self._num_passed])
            self._num_passed += 1
        # Told to end because a peer failed: what the rank waits for will not come.
        others_failed = received and any(
            path != self._place.report for path in self._place.failures.glob("rank*.json")
        )
        if others_failed and self._kill_s == float("inf"):
            self._kill_s = time.monotonic() + GRACE_S
        if time.monotonic() >= self._kill_s:
            self._ended_by_us = True
            self._kill(signal.SIGKILL)

    def _kill(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signum)

    def _last_words(self, status: int) -> int:
        if status == 0:
            return 0
        rank, host = self._place.rank, socket.gethostname()
        if self._place.report.exists():
            failure = from_json(self._place.report.read_text(encoding="utf-8"))
        else:
            kind = Kind.SIGNAL if status < 0 else Kind.EXIT
            text = tail(self._place.log, self._start_bytes)
            detail = f"its last output ({self._place.log}):\n{text}" if text else ""
            if self._ended_by_us:
                kind, detail = Kind.ENDED, ""
            failure = Failure(rank, host, self._pid, time.time(), kind, status, "", detail)
            write_whole(self._place.report, to_json(failure))
        sys.stderr.write(_spoken(failure) + "\n")
        return 128 - status if status < 0 else status


def _spoken(failure: Failure) -> str:
    """For the main log, where all ranks speak: consequences in a line, the rest in full."""
    head = f"rank {failure.rank} on {failure.host}: {how(failure)}"
    # what rank 0 wrote is in the main log already
    if is_consequence(failure) or not failure.detail or not failure.rank:
        return head
    lines = failure.detail.splitlines()
    return "\n".join([head, *(f"[rank {failure.rank}] {line}" for line in lines)])


def _write_all(fd: int, data: bytes) -> None:
    """To a launcher that may have gone: what it does not take is in the log."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(fd, data) :]
