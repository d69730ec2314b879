"""The one starter of local processes: fork, watch, and end them together.

One rule: the ranks live and die as one. The first failure ends all of them, the report names the
rank that caused it, and whatever ends the caller, also SIGKILL, ends the ranks.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from torchdistpackage.errors import LaunchError, RankError
from torchdistpackage.launch.entrypoint import EntryPoint
from torchdistpackage.launch.failure import Failure, FailureKind, read_failure, report
from torchdistpackage.launch.files import tail
from torchdistpackage.launch.fork_server_client import ForkedChild, ForkServer
from torchdistpackage.launch.ipc import unpack
from torchdistpackage.launch.rank import Result, pack_arguments

# Wait after the first failure: peers of a dead rank may be quicker than the kernel to tell of it.
NEWS_S = 0.3
_POLL_S = 0.1


@dataclass(slots=True)
class _LocalRank:
    rank: int
    child: ForkedChild
    log: Path | None  # None: shares the caller's output
    log_start_bytes: int
    log_read_bytes: int
    channel_open: bool = True
    outcome: Result | Failure | None = None


@dataclass(slots=True)
class _Signals:
    """Signals that asked the caller to end, in order; on `handled` ones ranks end by themselves."""

    handled: tuple[int, ...] = ()
    received: list[int] = field(default_factory=list[int])

    @contextlib.contextmanager
    def caught(self) -> Generator[None]:
        """Collect signals; afterwards deliver the first one as if never caught, unless handled."""
        in_main = threading.current_thread() is threading.main_thread()
        before = [
            (signum, signal.signal(signum, self._note))
            for signum in dict.fromkeys((signal.SIGINT, signal.SIGTERM, *self.handled))
            if in_main and signal.getsignal(signum) not in (signal.SIG_IGN, None)
        ]
        try:
            yield
        finally:
            for signum, handler in before:
                signal.signal(signum, handler)
        if fatal := [signum for signum in self.received if signum not in self.handled]:
            signal.raise_signal(fatal[0])

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)


def run_local(
    target: str | Callable[..., object],
    args: Sequence[object] = (),
    *,
    num_procs: int,
    preload: Sequence[str] = (),
    log_dir: Path | None = None,
    env: Mapping[str, str] | None = None,
    grace_s: float = 2.0,
    on_line: Callable[[int, str], None] | None = None,
    handled: Sequence[str] = (),
) -> list[object]:
    """Run `target(*args)` in `num_procs` processes of this machine; their results by rank.

    target: "module:function", or a function at the top level of a module or script.
    preload: modules to import once, before the processes are forked (torch above all).
    env: added to this process's environment; RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
        MASTER_ADDR, TDP_STORE (a file to meet at) and TDP_FAILURE (for last words) come on top.
    log_dir: where ranks other than 0 write `rank<r>.restart<n>.log`, with n from TDP_RESTART;
        None: a temporary file, shown when it matters. Rank 0 writes to the caller's output.
    grace_s: time from SIGTERM to SIGKILL, after a failure and when the caller is told to end.
    on_line: called in this thread with (rank, line) for each line that ranks other than 0 write.
    handled: signals ("USR1", "TERM", ...) on which ranks return by themselves: passed on, without a
        grace period; only a second SIGTERM ends the ranks.
    Else SIGINT and SIGTERM are passed on, and take effect here when all ranks are gone.

    Raises:
        RankError: a rank failed; the text ends with its rank, host, exit code and traceback.
        LaunchError: the processes cannot be started.
    """
    if num_procs < 1:
        raise LaunchError(f"num_procs is {num_procs}, but a run has at least 1 process")
    reference = EntryPoint.of(target)
    packed = pack_arguments(*args)
    signals = _Signals(tuple(signal.Signals[f"SIG{name}"] for name in handled))
    for stream in (sys.stdout, sys.stderr):  # what was written before must also come out before
        stream.flush()
    with signals.caught(), ForkServer(preload) as server:
        ranks: list[_LocalRank] = []
        for rank in range(num_procs):
            environment = {
                "OMP_NUM_THREADS": "1",
                **os.environ,
                **(env or {}),
                "RANK": str(rank),
                "WORLD_SIZE": str(num_procs),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(num_procs),
                "MASTER_ADDR": "127.0.0.1",
                "TDP_STORE": str(server.folder / "store"),
                "TDP_FAILURE": str(server.folder / f"failure{rank}.json"),
            }
            log = _log_path(log_dir or server.folder, rank, environment)
            ranks.append(_start(server, reference, packed, rank, log, environment))
        failures = _RankMonitor(server, ranks, signals, grace_s, on_line).until_gone()
        failures = [_with_output(failure, ranks[failure.rank]) for failure in failures]
    if failures:
        raise RankError(report(failures, num_procs))
    results = [rank.outcome.value for rank in ranks if isinstance(rank.outcome, Result)]
    if len(results) < num_procs:
        raise RankError(
            f"ended by signal {signals.received[0]} when {len(results)} of {num_procs} ranks "
            "had returned"
        )
    return [unpack(value, reference.aliases) for value in results]


def _log_path(folder: Path, rank: int, env: Mapping[str, str]) -> Path | None:
    if rank == 0:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"rank{rank}.restart{env.get('TDP_RESTART', '0')}.log"


def _start(
    server: ForkServer,
    reference: EntryPoint,
    args: bytes,
    rank: int,
    log: Path | None,
    env: Mapping[str, str],
) -> _LocalRank:
    with contextlib.ExitStack() as stack:
        stdout, stderr, size = 1, 2, 0
        if log is not None:
            file = stack.enter_context(log.open("ab"))
            stdout = stderr = file.fileno()
            size = file.tell()
        child = server.spawn(
            "torchdistpackage.launch.rank:main",
            (reference, args, rank),
            env=env,
            stdout=stdout,
            stderr=stderr,
            with_channel=True,
        )
    return _LocalRank(rank, child, log, size, size)


@dataclass(frozen=True, slots=True)
class _RankMonitor:
    """Waits for the ranks, and ends them all after the first failure or signal."""

    server: ForkServer
    ranks: list[_LocalRank]
    signals: _Signals
    grace_s: float
    on_line: Callable[[int, str], None] | None

    def until_gone(self) -> list[Failure]:
        """Return when no rank is left: the failures that were not the supervisor's own doing."""
        failures: list[Failure] = []
        news_end_s = kill_s = float("inf")
        num_signals = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self.server, selectors.EVENT_READ)
            for rank in self.ranks:
                assert rank.child.channel is not None
                selector.register(rank.child.channel, selectors.EVENT_READ)
            while self._running():
                selector.select(_POLL_S)
                self._hear(selector)
                now_s = time.monotonic()
                if kill_s == float("inf"):
                    failures = self._failures()
                if failures and news_end_s == float("inf"):
                    news_end_s = now_s + NEWS_S
                if now_s >= news_end_s and kill_s == float("inf"):
                    failures += [self._stopped(r) for r in self._running() if r.child.is_stopped]
                    kill_s = now_s + self.grace_s
                    self._signal(signal.SIGTERM)
                for signum in self.signals.received[num_signals:]:
                    kill_s = min(kill_s, now_s + self._patience_s(signum, num_signals))
                    self._signal(signum)
                    num_signals += 1
                if now_s >= kill_s:
                    self._signal(signal.SIGKILL)
        return failures

    def _patience_s(self, signum: int, num_before: int) -> float:
        """How long ranks that got `signum` may take; a second request to end means: now."""
        if signum not in self.signals.handled:
            return 0.0 if num_before else self.grace_s
        again = signum == signal.SIGTERM and signum in self.signals.received[:num_before]
        return 0.0 if again else float("inf")

    def _running(self) -> list[_LocalRank]:
        return [rank for rank in self.ranks if rank.child.exit is None]

    def _signal(self, signum: int) -> None:
        for rank in self._running():
            rank.child.signal(signum)

    def _hear(self, selector: selectors.BaseSelector) -> None:
        self.server.reap()  # first: what a rank sent before it ended is then there to be read
        for rank in self.ranks:
            channel = rank.child.channel
            if channel is not None and rank.channel_open:
                messages, rank.channel_open = channel.recv_ready()
                for message in messages:
                    assert isinstance(message, Result | Failure)
                    rank.outcome = message
                if not rank.channel_open:
                    selector.unregister(channel)
            if self.on_line is not None and rank.log is not None:
                for line in _new_lines(rank):
                    self.on_line(rank.rank, line)

    def _failures(self) -> list[Failure]:
        return [f for f in (self._failure(rank) for rank in self.ranks) if f is not None]

    def _failure(self, rank: _LocalRank) -> Failure | None:
        told = rank.outcome or read_failure(self.server.folder / f"failure{rank.rank}.json")
        if isinstance(told, Failure):
            return told
        gone = rank.child.exit
        if gone is None or (gone.exit_code == 0 and rank.outcome is not None):
            return None
        kind = FailureKind.SIGNAL if gone.exit_code < 0 else FailureKind.EXIT
        error = "" if gone.exit_code else "the process ended before its function returned"
        return Failure(
            rank.rank, socket.gethostname(), gone.pid, gone.time_s, kind, gone.exit_code, error
        )

    def _stopped(self, rank: _LocalRank) -> Failure:
        return Failure(
            rank.rank, socket.gethostname(), rank.child.pid, time.time(), FailureKind.STOPPED
        )


def _new_lines(rank: _LocalRank) -> list[str]:
    assert rank.log is not None
    with rank.log.open("rb") as file:
        file.seek(rank.log_read_bytes)
        data = file.read()
    if rank.child.exit is None:  # a line still being written waits for its end
        data = data[: data.rfind(b"\n") + 1]
    rank.log_read_bytes += len(data)
    return data.decode(errors="replace").splitlines()


def _with_output(failure: Failure, rank: _LocalRank) -> Failure:
    """A failure without traceback is explained, if at all, by the last lines the rank wrote."""
    if failure.detail or rank.log is None:
        return failure
    text = tail(rank.log, rank.log_start_bytes)
    return replace(failure, detail=f"its last output ({rank.log}):\n{text}") if text else failure
