"""Records of how ranks failed, and the rank that failed first.

When a rank fails, its peers fail too, through a closed connection or a time limit, and often report
first. The culprit is the failure that no other failure explains.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from torchdistpackage.bounded import parse_json, read_regular
from torchdistpackage.errors import RankError
from torchdistpackage.files import atomic_write

_MOST_BYTES = 1 << 24
"""Largest report of a rank that is read, in bytes."""


class FailureKind(StrEnum):
    """The way a rank ended, as far as its supervisor can tell."""

    SIGNAL = "signal"  # killed from outside, or by the processor (SIGSEGV)
    STOPPED = "stopped"  # still there, but it does not run
    ERROR = "error"  # a Python exception, with its traceback
    EXIT = "exit"  # an exit code without an exception
    HUNG = "hung"  # named by the report of a hang, which is the detail; the time is the alarm's
    ENDED = "ended"  # by its own supervisor, because another rank had failed


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of one rank: `error` in one line, `detail` in full (traceback or last output)."""

    rank: int
    host: str
    pid: int
    time_s: float  # time.time() on that host
    kind: FailureKind
    exit_code: int | None = None  # minus the signal, None while the process is still there
    error: str = ""
    detail: str = ""


# Texts by which gloo, NCCL, the stores and the kernel say that the other side is gone or silent.
_CONSEQUENCES = (
    "connection closed", "connection reset", "connection refused", "connection was closed",
    "broken pipe", "socket closed", "remote process exited", "peer closed",
    "timed out", "timeout", "time limit",
)  # fmt: skip

# By which `fail_together`, and checks of what ranks hold, name one rank on all ranks.
_ON_RANK = re.compile(
    r" failed on rank (\d+) on "
    r"| differ in bits: \S+ on rank (\d+)(?:;| and |$)"
    r"|: the (?:output|loss) of microbatch \d+ is not finite on rank (\d+), "
    r"|: on rank (\d+), stage \d+ the gradient of "
)

# How `comm.work.failed` names a call.
_CALL = re.compile(
    r"\b(?P<operation>\w+)(?: for [^()]*)? over (?P<group>.*) failed "
    r"\(number (?P<number>\d+), (?P<tensor>\w+\[[\d, ]*\])\)"
)

_LIBRARY = re.compile(r"/lib/python3[.\d]*/|^<")
"""Patterns of files that belong to Python or to installed packages."""
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+),? in (\S+)', re.MULTILINE)
_STACK = "its Python stack, the most recent call first"
_PATH_BYTES = 1 << 13

_HINTS: dict[int, str] = {
    signal.SIGKILL: " (perhaps the kernel, out of memory)",
    signal.SIGBUS: " (perhaps a mapped file, such as data, became shorter, or /dev/shm is full)",
}

# Modules whose frames stand before the user's in every traceback and explain nothing.
_CALLERS = (
    "torchdistpackage.launch.entrypoint",
    "torchdistpackage.launch.supervisor",
    "torchdistpackage.train.job",
    "torchdistpackage.train.worker",
    "torchdistpackage.harness.pool_worker",
    "torchdistpackage.compat.tplib",
)


def from_exception(rank: int, error: BaseException) -> Failure:
    """Return the record of an exception that left the function of this process's rank.

    SystemExit with a code other than 0 counts as an exit; only its line is reported, without a
    traceback.
    """
    host, pid, now_s = socket.gethostname(), os.getpid(), time.time()
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
        text = "" if error.code is None or isinstance(error.code, int) else str(error.code)
        if source_line := _place(error):
            exit_call = f"{_call(error)} at {source_line}"
            text = f"{text}, by {exit_call}" if text else exit_call
        return Failure(rank, host, pid, now_s, FailureKind.EXIT, code & 0xFF, error=text)
    last_line = traceback.format_exception_only(error)[-1].strip()
    first_line = str(error).strip().partition("\n")[0]
    error_line = f"{type(error).__name__}: {first_line}" if first_line else last_line
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_globals["__name__"] in _CALLERS:
        trace = trace.tb_next
    detail = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return Failure(rank, host, pid, now_s, FailureKind.ERROR, 1, error_line, detail)


@contextmanager
def only_returns() -> Generator[None]:
    """Turn `sys.exit()` with code 0 or none inside the block into an error.

    A rank of a run ends successfully only by returning. Otherwise its peers and its launcher would
    mistake an early exit for success.

    Raises:
        RankError: names the line that exited.
    """
    try:
        yield
    except SystemExit as error:
        if error.code:
            raise
        raise RankError(
            f"{_call(error)} at {_place(error)} ended this rank before its run had finished; "
            f"return from the code that the run calls, or raise an exception"
        ) from error


def _call(error: SystemExit) -> str:
    """Return the call of sys.exit as text."""
    shown = "" if error.code is None else repr(error.code) if isinstance(error.code, int) else "..."
    return f"sys.exit({shown})"


def _place(error: BaseException) -> str:
    """Return the file, line and function that raised `error`, outside of libraries if possible."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if not _LIBRARY.search(frame.filename)]
    innermost = next(iter([*user_frames[-1:], *frames[-1:]]), None)
    if innermost is None:
        return ""
    return f'"{innermost.filename}", line {innermost.lineno}, in {innermost.name}'


def from_exit(
    rank: int, pid: int, exit_code: int | None, time_s: float, detail: str = ""
) -> Failure:
    """Return the record of a rank of this host that left no record itself.

    exit_code: minus the signal that killed it; None: it is stopped.
    """
    if exit_code is None:
        return Failure(rank, socket.gethostname(), pid, time_s, FailureKind.STOPPED)
    kind = FailureKind.SIGNAL if exit_code < 0 else FailureKind.EXIT
    error = "" if exit_code else "the process ended before its function returned"
    return Failure(rank, socket.gethostname(), pid, time_s, kind, exit_code, error, detail)


def note_stacks(report: Path, stacks: Path) -> None:
    """Record, next to a rank's report, the file for the stacks that faulthandler's C code writes.

    Raises:
        OSError: it cannot be written.
    """
    atomic_write(report.with_suffix(".stacks"), str(stacks.absolute()))


def with_crash(failure: Failure, report: Path) -> Failure:
    """Return the failure of a rank killed by a signal, with the line it was at, if known."""
    if failure.kind is not FailureKind.SIGNAL:
        return failure
    try:
        path = Path(read_regular(report.with_suffix(".stacks"), _PATH_BYTES).decode())
        text = read_regular(path, _MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return failure
    if not text.startswith("Fatal"):
        return failure
    head, *threads = re.split(r"^(?=Thread |Current thread )", text, flags=re.MULTILINE)
    # the thread that crashed, if it runs Python, then the main one, which comes last
    threads.reverse()
    threads.sort(key=lambda x: not x.startswith("Current"))
    stack = next((x for x in threads if _own_frames(x)), *threads[:1] or [""])
    stack = stack.partition("\n\n")[0].strip()
    detail = "\n".join([failure.detail, f"{_STACK} ({head.strip()}):", stack]).strip()
    return replace(failure, error=user_line(stack, innermost_first=True), detail=detail)


def user_line(text: str, *, innermost_first: bool = False) -> str:
    """Return the innermost line of user code in a traceback or a faulthandler stack.

    User code is neither in this package nor in a library; "" if there is none."""
    frames = _own_frames(text)
    if not frames:
        return ""
    file, line, function = frames[0 if innermost_first else -1]
    return f'"{file}", line {line}, in {function}'


def _own_frames(text: str) -> list[tuple[str, str, str]]:
    """Return the frames of user code in a traceback: neither in this package nor in a library."""
    return [
        frame
        for frame in _FRAME.findall(text)
        if not _LIBRARY.search(frame[0]) and not frame[0].startswith(_PACKAGE)
    ]


def is_secondary(failure: Failure) -> bool:
    """Return True if this is how the peers of a failed rank fail."""
    aborted = _is_abort(failure)
    if failure.kind is not FailureKind.ERROR and not aborted:
        return False
    # An abort is how NCCL's watchdog and C++ end a rank that waited in vain; its output says so.
    text = (failure.detail.partition(_STACK)[0] if aborted else failure.error).lower()
    if named := _ON_RANK.search(text):
        return int(next(filter(None, named.groups()))) != failure.rank
    return any(phrase in text for phrase in _CONSEQUENCES)


def _is_abort(failure: Failure) -> bool:
    """Return True if the process aborted."""
    return failure.kind is FailureKind.SIGNAL and failure.exit_code == -signal.SIGABRT


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure to blame: a killed rank, then a stopped one, then the earliest that is no
    consequence.

    Failures after the alarm of a hang are consequences of the hang. Among ranks that gloo aborted
    or disconnected, the culprit is the only one in a different call, if there is one.
    """
    alarm_s = min((f.time_s for f in failures if f.kind is FailureKind.HUNG), default=float("inf"))

    def order(failure: Failure) -> tuple[int, float]:
        if failure.time_s > alarm_s or failure.kind is FailureKind.ENDED:
            return 4, failure.time_s
        if is_secondary(failure):
            return 3, failure.time_s
        if failure.kind is FailureKind.SIGNAL and failure.exit_code != -signal.SIGABRT:
            return 0, failure.time_s
        return (1 if failure.kind is FailureKind.STOPPED else 2), failure.time_s

    first = min(failures, key=order)
    if _is_abort(first) or is_secondary(first):
        return _in_another_call(failures) or first
    return first


def _in_another_call(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure whose line in the user's code differs from all others, or None.

    All ranks must have lost the connection or been aborted: gloo aborts a rank that receives too
    much because the sender is in a different call.
    """
    if not all(_is_abort(failure) or is_secondary(failure) for failure in failures):
        return None
    if (odd := _with_another_tensor(failures)) is not None:
        return odd
    at = [(user_line(f.detail, innermost_first=_is_abort(f)), f) for f in failures]
    for line, failure in at:
        others = {other for other, each in at if each is not failure}
        if len(at) > 2 and line and len(others) == 1 and "" not in others and line not in others:
            return failure
    return None


def _with_another_tensor(failures: Sequence[Failure]) -> Failure | None:
    """Return the one failure in another call of a group, or with another tensor, than two or more
    others that agree; None if there is none.

    Where gloo aborted a rank, a call too few has put one rank a number ahead of the others.
    """
    by_number: dict[object, dict[object, list[Failure]]] = {}
    by_group: dict[object, dict[object, list[Failure]]] = {}
    for failure in failures:
        if match := _CALL.search(failure.error):
            group, number, call = (
                match["group"],
                match["number"],
                (match["operation"], match["tensor"]),
            )
            by_number.setdefault((group, number), {}).setdefault(call, []).append(failure)
            by_group.setdefault(group, {}).setdefault((number, *call), []).append(failure)
    places = list(by_number.values())
    places += by_group.values() if any(map(_is_abort, failures)) else ()
    for by_call in places:
        alone = [same[0] for same in by_call.values() if len(same) == 1]
        if len(by_call) == 2 and len(alone) == 1:
            return alone[0]
    return None


def summary(failure: Failure) -> str:
    """Return one line: "killed by SIGKILL", "exit code 1: ValueError: ..."."""
    if failure.kind is FailureKind.STOPPED:
        return "stopped (process state T), so its peers waited for it in vain"
    if failure.kind is FailureKind.ENDED:
        return "ended, because another rank failed"
    if failure.kind is FailureKind.HUNG:
        return f"hang: it {failure.error}"
    code = failure.exit_code
    if failure.kind is FailureKind.SIGNAL and code is not None:
        hint = _HINTS.get(-code, "")
        name = {s.value: f" ({s.name})" for s in signal.Signals}.get(-code, "")
        at = f", at {failure.error}" if failure.error else ""
        return f"killed by signal {-code}{name}{hint}{at}"
    error = f": {failure.error}" if failure.error else ""
    return f"exit code {code}{error}"


def report(failures: Sequence[Failure], num_ranks: int) -> str:
    """Return the final text: the culprit's name, the others in one line each, the culprit in full.

    The first and last lines are equal, because logs are read from either end.
    """
    first = root_cause(failures)
    lines = [f"rank {first.rank} of {num_ranks} failed: {summary(first)}"]
    if first is _with_another_tensor(failures):
        lines.append(
            "  two or more other ranks made the same call, but this rank made none, or with "
            "another tensor"
        )
    elif first is _in_another_call(failures):
        lines.append(
            f"  only this rank was at {user_line(first.detail, innermost_first=_is_abort(first))}"
        )
    elif _is_abort(first) and len(failures) > 1:
        lines.append("  gloo aborts a rank to which another one sends too much: compare the lines")
    for failure in sorted(failures, key=lambda f: f.time_s):
        if failure is not first and failure.kind is not FailureKind.ENDED:
            then = "then" if failure.time_s >= first.time_s else "also"
            message = failure.error if failure.kind is not FailureKind.SIGNAL else ""
            lines.append(f"rank {failure.rank} {then} failed: {message or summary(failure)}")
            # gloo aborts the rank that is sent too much, and the call too many is another's
            line = user_line(failure.detail, innermost_first=_is_abort(failure))
            if (_is_abort(first) or is_secondary(first)) and line:
                lines.append(f"  at {line}")
    lines.append(
        f"--- rank {first.rank} on host {first.host} (pid {first.pid}): {summary(first)} ---"
    )
    if first.detail:
        lines.append(first.detail)
    return "\n".join(lines)


def read_failure(path: Path) -> Failure | None:
    """Return the failure that a rank recorded, or None if there is no complete record."""
    try:
        return from_json(read_regular(path, _MOST_BYTES).decode())
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_failure_reports(folder: Path) -> list[Failure]:
    """Return the complete failure reports of one start, by rank."""
    failures = map(read_failure, folder.glob("rank*.json"))
    return sorted((f for f in failures if f is not None), key=lambda failure: failure.rank)


def to_json(failure: Failure) -> str:
    """Return the failure as one JSON object."""
    return json.dumps(asdict(failure))


def from_json(text: str) -> Failure:
    """Return the failure from `to_json`.

    Raises:
        ValueError, TypeError, KeyError: it is not one, or was cut short.
    """
    fields: dict[str, Any] = parse_json(text)
    fields["kind"] = FailureKind(fields["kind"])
    return Failure(**fields)
