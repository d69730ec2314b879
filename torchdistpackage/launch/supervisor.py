"""Watch a rank that a launcher started: this process forks the rank and waits for it.

A rank cannot say that it was killed, and a launcher only says that something ended. The parent
imports nothing that can break (no torch), so it is there when the rank is not, and leaves one
report per rank that failed, which says how. Its output is the launcher's: all that rank 0 writes,
and of the others what they failed of. Every rank's own output goes to a log of its own.

While the rank is stopped (SIGSTOP, Ctrl-Z, a debugger) a note next to its report says so: by its
silence alone it cannot be distinguished from a host that is gone.

A rank that lost a peer which leaves no word keeps its task for a while, so that Slurm learns why.
Only a rank whose own failure is the consequence of another's waits, and only while some rank has
left no report. A node on which no task is left confirms the end of its job in its answer to
slurmctld, which reads the answers when it has all of them, and for that of a node that is gone it
waits one MessageTimeout. A node on which a task still runs confirms by a message of its own.
"""

import contextlib
import mmap
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from torchdistpackage.environment.failure import (
    Failure,
    FailureKind,
    from_exception,
    from_exit,
    from_json,
    is_secondary,
    read_failure,
    summary,
    to_json,
    with_crash,
)
from torchdistpackage.errors import LaunchError
from torchdistpackage.files import atomic_write, make_folder, open_regular, tail, write_all
from torchdistpackage.launch.process import (
    STOPPED,
    SignalFlag,
    die_with_parent,
    line_stream,
    num_threads,
    stopped,
    thread_names,
)

HOLD_S = 30.0
"""Seconds to wait for news about a lost peer; they are lost if no node is gone and the peer goes
on.
"""
GRACE_S = 2.0
"""Seconds for a rank to end by itself after another one failed and this process was asked to
end.
"""
_POLL_S = 0.25
_SIGNAL_S = 0.1
_LOOK_S = 1.0
_SKEW_NS = 5 * 10**9
"""Largest delay in nanoseconds with which this task may start after others; older reports belong to
another step.
"""
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class WatchedRank:
    """A watched rank: its number, its log, and its report of this start.

    decision: file which says that the run has ended; a rank that is asked to end then, ends.
    num_ranks: ranks of this start, if a rank that lost a peer should wait for news of it.
    """

    rank: int
    log: Path
    failures: Path
    decision: Path | None = None
    num_ranks: int = 0

    @property
    def report(self) -> Path:
        return self.failures / f"rank{self.rank}.json"

    def has_ended(self) -> bool:
        return self.decision is not None and self.decision.exists()


def supervise(body: Callable[[], int], rank: WatchedRank, signals: SignalFlag) -> int:
    """Run `body` in a fork of this process and return its exit code, 128 + signal if killed.

    `signals` already have handlers, which the rank uses too. Signals that arrive here are passed
    on.

    Raises:
        LaunchError: this process has threads, so it must not fork.
    """
    if (num := num_threads()) > 1:
        raise LaunchError(
            f"this process has {num} threads ({thread_names()}), and such a process must not fork "
            f"a rank; start `tdp train` as a program of its own"
        )
    make_folder(rank.log.parent)
    for stream in (sys.stdout, sys.stderr):  # or both processes would write it
        stream.flush()
    log = _open_log(rank)
    watch = _RankSupervisor(rank, signals)  # before the fork: what comes later is for the rank too
    parent, has_returned = os.getpid(), mmap.mmap(-1, 1)  # shared with the fork
    read_end, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        os.close(log)
        _be_the_rank(body, rank, write, has_returned, parent)
    os.close(write)
    with os.fdopen(log, "ab", 0), os.fdopen(read_end, "rb", 0) as output:
        os.set_blocking(output.fileno(), False)
        status = watch.until_gone(pid, output.fileno(), log)
    if status == 0 and has_returned[0]:
        return 0
    failure = watch.last_words(status)
    if rank.num_ranks and is_secondary(failure):
        wait_for_word(rank.failures, rank.rank, rank.num_ranks, signals, rank.has_ended)
    return 128 - status if status < 0 else status or 1


def _open_log(rank: WatchedRank) -> int:
    """Open the rank's log for appending, making it if missing; do not follow a link to it.

    Raises:
        LaunchError: it cannot be written.
    """
    try:
        return open_regular(rank.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except OSError as error:
        raise LaunchError(
            f"rank {rank.rank} cannot write its log {rank.log}: {error.strerror or error}; remove "
            f"what is there, or set run.dir to a folder that the ranks can write to"
        ) from error


def _reports(rank: WatchedRank) -> dict[Path, int]:
    """Return the existing reports of other ranks and the decision, each with its modification
    time.
    """
    sizes: dict[Path, int] = {}
    decision = () if rank.decision is None else (rank.decision,)
    for path in (*rank.failures.glob("rank*.json"), *decision):
        with contextlib.suppress(OSError):
            sizes[path] = path.stat().st_mtime_ns
    sizes.pop(rank.report, None)
    return sizes


def _be_the_rank(
    body: Callable[[], int], rank: WatchedRank, out: int, has_returned: mmap.mmap, parent: int
) -> NoReturn:
    """Run the rank in the forked process to its end; `has_returned` is set when `body` returns."""
    code = 1
    try:
        die_with_parent(parent)
        os.environ["TDP_FAILURE"] = str(rank.report)
        for fd in (1, 2):
            os.dup2(out, fd)
        os.close(out)
        sys.stdout, sys.stderr = line_stream(1), line_stream(2)
        try:
            code = body()
            has_returned[0] = 1
        except BaseException as error:
            if isinstance(error, SystemExit) and error.code in (None, 0):
                code = 0
            else:
                if not isinstance(error, SystemExit):
                    traceback.print_exc()
                failure = from_exception(rank.rank, error)
                _leave(rank, failure)
                code = failure.exit_code or 1
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        # Not sys.exit: after a failure it would wait for native threads that wait for peers.
        os._exit(code & 0xFF)


def _leave(rank: WatchedRank, failure: Failure) -> None:
    """End the rank. Even if its report cannot be written it ends as it should, and its log says
    how.

    The report of a hang stays: what a rank raises afterwards is a consequence of the hang.
    """
    reported = read_failure(rank.report)
    if reported is not None and reported.kind is FailureKind.HUNG:
        return
    try:
        atomic_write(rank.report, to_json(failure))
    except OSError as error:
        sys.stderr.write(f"the report {rank.report} cannot be written: {error}\n")


class _RankSupervisor:
    """The parent: copies output, passes signals on, and ends a rank whose peers are gone."""

    def __init__(self, rank: WatchedRank, signals: SignalFlag) -> None:
        self._rank, self._signals = rank, signals
        self._num_passed = len(signals.all_received)
        log_stat = rank.log.stat()
        self._log_start_bytes = log_stat.st_size
        # By the clock of the file system, which all ranks share. A peer may fail before we begin.
        old_ns = log_stat.st_mtime_ns - _SKEW_NS
        self._earlier = {path: at_ns for path, at_ns in _reports(rank).items() if at_ns < old_ns}
        self._pid = 0
        self._look_s = self._state_s = 0.0
        self._letter = ""
        self._kill_s = float("inf")
        self._ended_by_us = False

    def until_gone(self, pid: int, output: int, log: int) -> int:
        """Wait for the rank and return its exit code, or minus the signal that killed it."""
        self._pid = pid
        status = None
        with contextlib.suppress(OSError):
            note_stopped(self._rank.report, "")  # another step's
            self._rank.report.with_suffix(".stacks").unlink(missing_ok=True)
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while status is None:
                # wakes for output; the limit is for signals and the end of the rank, which write
                # none
                selector.select(_POLL_S)
                if not self._copy(output, log) and selector.get_map():
                    selector.unregister(output)
                    time.sleep(_POLL_S / 10)  # the rank closed its output and is about to exit
                self._look_around()
                if (now_s := time.monotonic()) >= self._state_s:
                    self._state_s = now_s + _LOOK_S
                    self._note_state(stopped(self._pid))
                ended, raw = os.waitpid(self._pid, os.WNOHANG)
                status = os.waitstatus_to_exitcode(raw) if ended else None
            self._copy(output, log)
            self._note_state("")
        return status

    def _copy(self, output: int, log: int) -> bool:
        """Copy the available output; return False when no more will come."""
        while True:
            try:
                data = os.read(output, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            _write_all(log, data)
            if self._rank.rank == 0:
                _write_all(1, data)

    def _look_around(self) -> None:
        received, now_s = self._signals.all_received, time.monotonic()
        while self._num_passed < len(received):
            self._kill(received[self._num_passed])
            self._num_passed += 1
        # Asked to end because a peer failed or has ended: what the rank waits for will not come.
        if received and now_s >= self._look_s and self._kill_s == float("inf"):
            self._look_s = now_s + _LOOK_S
            if _reports(self._rank).items() - self._earlier.items():
                self._kill_s = now_s + GRACE_S
        if now_s >= self._kill_s:
            self._ended_by_us = True
            self._kill(signal.SIGKILL)

    def _note_state(self, letter: str) -> None:
        if letter != self._letter:
            with contextlib.suppress(OSError):
                note_stopped(self._rank.report, letter)
                self._letter = letter

    def _kill(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signum)

    def last_words(self, status: int) -> Failure:
        """Report how the rank ended, unless it has done so itself."""
        rank = self._rank
        if rank.report.exists():
            failure = from_json(rank.report.read_text(encoding="utf-8"))
        else:
            text = tail(rank.log, self._log_start_bytes)
            detail = f"its last output ({rank.log}):\n{text}" if text else ""
            failure = from_exit(rank.rank, self._pid, status, time.time(), detail)
            failure = with_crash(failure, rank.report)
            if self._ended_by_us:
                failure = replace(failure, kind=FailureKind.ENDED, detail="")
            _leave(rank, failure)
        sys.stderr.write(_spoken(failure) + "\n")
        if not rank.log.exists():  # removed in mid-run, and with it what was said there
            with contextlib.suppress(OSError):
                atomic_write(rank.log, f"{summary(failure)}\n{failure.detail}\n")
        return failure


def _spoken(failure: Failure) -> str:
    """Return the text for the main log of all ranks: consequences in one line, causes in full."""
    head = f"rank {failure.rank} on {failure.host}: {summary(failure)}"
    # what rank 0 wrote is in the main log already, but no one writes a report of a hang
    reported = not failure.rank and failure.kind is not FailureKind.HUNG
    if is_secondary(failure) or not failure.detail or reported:
        return head
    lines = failure.detail.splitlines()
    return "\n".join([head, *(f"[rank {failure.rank}] {line}" for line in lines)])


def _write_all(fd: int, data: bytes) -> None:
    """Write everything to a launcher that may be gone, or a disk that may be full; neither may end
    the run.
    """
    with contextlib.suppress(OSError):
        write_all(fd, data)


def note_stopped(report: Path, letter: str) -> None:
    """Record next to a rank's report that the rank is stopped, or with "" that it is not.

    Raises:
        OSError: that cannot be written.
    """
    note = report.with_suffix(".stopped")
    if letter:
        atomic_write(note, letter)
    else:
        note.unlink(missing_ok=True)


def noted_stopped(report: Path) -> str:
    """Return the letter that the watcher recorded for the rank with that report, or ""."""
    with contextlib.suppress(OSError, ValueError):
        letter = report.with_suffix(".stopped").read_text(encoding="utf-8")
        return letter if letter in STOPPED else ""
    return ""


def wait_for_word(
    failures: Path,
    rank: int,
    num_ranks: int,
    signals: SignalFlag,
    has_ended: Callable[[], bool],
    limit_s: float = HOLD_S,
) -> None:
    """Wait until all ranks have left reports in `failures`, or Slurm asks this process to end.

    has_ended: returns whether the run has ended, in which case not all ranks leave reports.
    """
    until_s = time.monotonic() + limit_s
    look_s, announced = 0.0, False
    while not signals.all_received and (now_s := time.monotonic()) < until_s:
        if now_s >= look_s:
            first, look_s = not look_s, now_s + _LOOK_S
            # list names without opening files, because every rank looks here
            reported = {int(path.stem.removeprefix("rank")) for path in failures.glob("rank*.json")}
            if len(reported) >= num_ranks or has_ended():
                return
            if not first and not announced and rank == min(reported, default=rank):
                announced = True
                sys.stderr.write(
                    f"no word from {num_ranks - len(reported)} of {num_ranks} ranks; if their node "
                    f"is gone, Slurm has up to {limit_s:g} s to find out\n"
                )
        time.sleep(_SIGNAL_S)  # short, so that a signal of Slurm ends the wait quickly
