"""Ranks on this machine: forked from one server, watched, and ended together.

The ranks live and die as one. The first failure ends all of them, the report names the rank that
caused it, and whatever ends the caller, also SIGKILL, ends the ranks.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Self

from torchdistpackage.environment.failure import (
    Failure,
    FailureKind,
    from_exit,
    is_secondary,
    read_failure,
    report,
    with_crash,
)
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import LaunchError, RankError
from torchdistpackage.files import open_regular, tail
from torchdistpackage.launch.entrypoint import EntryPoint, Result, pack_arguments
from torchdistpackage.launch.fork_server_client import ForkedChild, ForkServer
from torchdistpackage.launch.ipc import Channel, unpack

_NEWS_S = 0.3
"""Seconds to wait after the first failure: peers of a dead rank may be reported before the rank
itself."""
_CAUSE_S = 3.0
"""Seconds to wait while only peers have failed, because a busy machine reports the dead rank
late.
"""
_POLL_S = 0.1
_RUN_RANK = "torchdistpackage.launch.entrypoint:run_rank"
# A rank that trains imports all of these; the last when it makes its first optimizer.
_PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "torchdistpackage.comm.runtime")
"""Modules that every rank needs: importing them once saves each rank a tenth of a second of CPU."""


class SignalledError(RankError):
    """The caller was asked to end, and not all ranks had returned."""


@dataclass(slots=True)
class LocalRank:
    """The process of a rank. log: its output, from `log_start_bytes` on; None: the caller's.

    is_open: its end of the channel is not known to be closed. The kernel closes it when the process
    ends, before the server can notice and report it.
    """

    rank: int
    child: ForkedChild
    channel: Channel
    log: Path | None
    log_start_bytes: int = 0
    is_open: bool = True

    @property
    def is_running(self) -> bool:
        return self.child.exit is None

    def exit_failure(self) -> Failure | None:
        """Return how its process ended; None while it runs."""
        gone = self.child.exit
        return gone and from_exit(self.rank, gone.pid, gone.exit_code, gone.time_s)

    def with_output(self, failure: Failure) -> Failure:
        """Return the failure with the rank's last lines of output, which may explain it if there is
        no traceback.
        """
        if failure.detail or not self.log or not (text := tail(self.log, self.log_start_bytes)):
            return failure
        return replace(failure, detail=f"its last output ({self.log}):\n{text}")


class WorkerGroup:
    """Ranks that are forked by one server and that start and end together."""

    def __init__(self, server: ForkServer) -> None:
        self.server = server
        self.ranks: list[LocalRank] = []

    def start(
        self,
        target: str,
        args: tuple[object, ...],
        env: Mapping[str, str],
        log: Path | None,
    ) -> None:
        """Start the next rank: `target(channel, *args)`, with its output appended to `log`."""
        if not self.ranks:
            self._selector = selectors.DefaultSelector()
            self._selector.register(self.server, selectors.EVENT_READ)
        with contextlib.ExitStack() as stack:
            stdout, stderr, size = 1, 2, 0
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                handle = open_regular(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                file = stack.enter_context(os.fdopen(handle, "ab"))
                stdout = stderr = file.fileno()
                size = file.tell()
            child = self.server.spawn(
                target, args, env=env, stdout=stdout, stderr=stderr, with_channel=True
            )
        assert child.channel is not None
        worker = LocalRank(len(self.ranks), child, child.channel, log, size)
        self.ranks.append(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)

    def poll(self, timeout_s: float | None) -> list[tuple[int, object]]:
        """Return the messages from ranks, each with its rank; wait for a message, an end or
        `timeout_s`.

        Raises:
            LaunchError: the server is gone, and all ranks with it.
        """
        self._selector.select(timeout_s)
        self.server.reap()  # first: what a rank sent before it ended is then there to be read
        outcomes: list[tuple[int, object]] = []
        for worker in [key.data for key in self._selector.get_map().values() if key.data]:
            messages, open_ = worker.channel.recv_ready()
            outcomes += [(worker.rank, message) for message in messages]
            if not open_:
                self._selector.unregister(worker.channel)
                worker.is_open = False
        return outcomes

    @property
    def running(self) -> list[LocalRank]:
        return [worker for worker in self.ranks if worker.is_running]

    @property
    def ended(self) -> set[int]:
        """Return the ranks whose processes are gone."""
        return {worker.rank for worker in self.ranks if not worker.is_running}

    @property
    def hung_up(self) -> set[int]:
        """Ranks that ended or closed their channels, as seen by the last `poll`."""
        return {worker.rank for worker in self.ranks if not worker.is_open} | self.ended

    def news_s(self, failures: Sequence[Failure]) -> float:
        """Return how long to wait after the first of `failures` for others that explain them."""
        is_explained = not all(map(is_secondary, failures))
        if is_explained or any(worker.child.is_stopped for worker in self.running):
            return _NEWS_S
        return _CAUSE_S

    def signal(self, signum: int) -> None:
        for worker in self.running:
            worker.child.signal(signum)

    def kill(self) -> None:
        """Kill all ranks and wait until they are gone; new ones may be started then."""
        self.signal(signal.SIGKILL)
        with contextlib.suppress(LaunchError):  # gone with the server
            while self.running:
                self.poll(None)
        for worker in self.ranks:
            worker.channel.close()
        if self.ranks:
            self._selector.close()
        self.ranks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


@dataclass(slots=True)
class _Signals:
    """Signals that asked the caller to end, in order; ranks end by themselves on `handled` ones."""

    handled: tuple[int, ...] = ()
    received: list[int] = field(default_factory=list[int])

    @contextlib.contextmanager
    def caught(self) -> Generator[None]:
        """Collect signals. Afterwards the first one takes effect as if never caught, unless it is
        handled.
        """
        in_main = threading.current_thread() is threading.main_thread()
        previous = [
            (signum, signal.signal(signum, self._note))
            for signum in dict.fromkeys((signal.SIGINT, signal.SIGTERM, *self.handled))
            if in_main and signal.getsignal(signum) not in (signal.SIG_IGN, None)
        ]
        try:
            yield
        finally:
            for signum, handler in previous:
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
    server: ForkServer | None = None,
) -> list[object]:
    """Run `target(*args)` in `num_procs` processes of this machine and return their results by
    rank.

    target: "module:function", or a function at the top level of a module or script.
    preload: modules to import once, before the processes are forked (torch above all).
    env: added to this process's environment; RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
        MASTER_ADDR, TDP_STORE (a file to meet at) and TDP_FAILURE (for last words) come on top.
    log_dir: where ranks other than 0 write `rank<r>.restart<n>.log`, with n from TDP_RESTART;
        None: a temporary file, shown when it matters. Rank 0 writes to the caller's output.
    grace_s: time from SIGTERM to SIGKILL, after a failure and when the caller is asked to end.
    on_line: called in this thread with (rank, line) for each line that ranks other than 0 write.
    handled: signals ("USR1", "TERM", ...) on which ranks return by themselves: passed on, without a
        grace period; only a second SIGTERM ends the ranks.
    server: kept by the caller, who starts ranks again without another import of `preload`.
    Else SIGINT and SIGTERM are passed on, and take effect here when all ranks are gone.

    Raises:
        RankError: a rank failed; the text ends with its rank, host, exit code and traceback.
        LaunchError: the processes cannot be started.
    """
    if num_procs < 1:
        raise LaunchError(
            f"num_procs is {num_procs}, but a run has at least 1 process; give 1 or more"
        )
    reference = EntryPoint.of(target)
    packed = pack_arguments(*args)
    signals = _Signals(tuple(signal.Signals[f"SIG{name}"] for name in handled))
    for stream in (sys.stdout, sys.stderr):  # what was written before must also come out before
        stream.flush()
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals.caught())
        server = stack.enter_context(ForkServer(preload)) if server is None else server
        # ranks of an earlier call have left theirs
        folder = Path(tempfile.mkdtemp(dir=server.folder))
        group = stack.enter_context(WorkerGroup(server))
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
                "TDP_STORE": str(folder / "store"),
                "TDP_FAILURE": str(folder / f"failure{rank}.json"),
            }
            name = f"rank{rank}.restart{environment.get('TDP_RESTART', '0')}.log"
            log = (log_dir or folder) / name if rank else None
            group.start(_RUN_RANK, (reference, packed, rank), environment, log)
        watch = _RankMonitor(group, folder, signals, grace_s, on_line)
        failures = watch.until_gone()
        failures = [watch.explained(failure) for failure in failures]
        failures += watch.left_early(failures)
    if failures:
        raise RankError(report(failures, num_procs))
    results = [o.value for _, o in sorted(watch.outcomes.items()) if isinstance(o, Result)]
    if len(results) < num_procs:
        raise SignalledError(
            f"ended by signal {signals.received[0]} when {len(results)} of {num_procs} ranks "
            "had returned"
        )
    return [unpack(value, reference.aliases) for value in results]


def show_line(rank: int, line: str) -> None:
    """Print a line of another rank; pass it as `on_line`. Rank 0 writes to this process's output
    itself.
    """
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run_or_launch(
    fn: Callable[..., object],
    *args: object,
    num_procs: int,
    preload: Sequence[str] = (),
) -> object:
    """Call `fn(*args)` as the rank that this process is, or on `num_procs` new ranks.

    Under torchrun or srun this process is a rank already, so nothing is started.

    fn: a function at the top level of a module or script; it calls `setup_distributed()`.
    preload: what is imported once, before the new ranks are forked, besides torch.

    Only rank 0 of new ranks prints here; the text of a failure ends with what the failed rank
    printed. Under a launcher its options decide. To see all ranks call
    `run_local(fn, args, num_procs=n, on_line=show_line)` (torchdistpackage.launch.workers).

    Returns what `fn` returned: here under a launcher, else on rank 0.

    Raises:
        RankError: a new rank failed; the text ends with its rank, host and traceback.
        LaunchError: the launcher's variables are incomplete, or no process can be started.
    """
    if detect(os.environ).source != "alone":
        return fn(*args)
    return run_local(fn, args, num_procs=num_procs, preload=(*_PRELOAD, *preload))[0]


@dataclass(frozen=True, slots=True)
class _RankMonitor:
    """Waits for the ranks, and ends all of them after the first failure or signal.

    folder: of the ranks' failures. outcomes: results or failures that the ranks reported.
    read_bytes: of each log.
    """

    group: WorkerGroup
    folder: Path
    signals: _Signals
    grace_s: float
    on_line: Callable[[int, str], None] | None
    outcomes: dict[int, Result | Failure] = field(default_factory=dict[int, Result | Failure])
    read_bytes: dict[int, int] = field(default_factory=dict[int, int])

    def until_gone(self) -> list[Failure]:
        """Return when no rank is left: the failures that the supervisor itself did not cause."""
        failures: list[Failure] = []
        first_s = kill_s = float("inf")
        num_signals = 0
        while self.group.running:
            for rank, outcome in self.group.poll(_POLL_S):
                assert isinstance(outcome, Result | Failure)
                self.outcomes[rank] = outcome
            self._show_new_lines()
            now_s = time.monotonic()
            if kill_s == float("inf"):
                failures = [f for f in map(self._failure, self.group.ranks) if f is not None]
            if failures:
                first_s = min(first_s, now_s)
            if now_s >= first_s + self.group.news_s(failures) and kill_s == float("inf"):
                failures += [
                    from_exit(w.rank, w.child.pid, None, time.time())
                    for w in self.group.running
                    if w.child.is_stopped
                ]
                kill_s = now_s + self.grace_s
                self.group.signal(signal.SIGTERM)
            for signum in self.signals.received[num_signals:]:
                kill_s = min(kill_s, now_s + self._patience_s(signum, num_signals))
                self.group.signal(signum)
                num_signals += 1
            if now_s >= kill_s:
                self.group.signal(signal.SIGKILL)
        return failures

    def _patience_s(self, signum: int, num_before: int) -> float:
        """Return how long ranks that got `signum` may take; a second request to end means no
        wait.
        """
        if signum not in self.signals.handled:
            return 0.0 if num_before else self.grace_s
        again = signum == signal.SIGTERM and signum in self.signals.received[:num_before]
        return 0.0 if again else float("inf")

    def _failure(self, worker: LocalRank) -> Failure | None:
        outcome = self.outcomes.get(worker.rank)
        report = read_failure(self.folder / f"failure{worker.rank}.json")
        # after the report of a hang a rank may raise, as a peer that has ended already is gone
        failure = (
            report if report is not None and report.kind is FailureKind.HUNG else outcome or report
        )
        if isinstance(failure, Failure):
            return failure
        ended = worker.exit_failure()
        return None if ended is None or (ended.exit_code == 0 and outcome) else ended

    def left_early(self, failures: Sequence[Failure]) -> list[Failure]:
        """Return the ranks that had returned, if all that failed lost a peer: these."""
        if not failures or not all(map(is_secondary, failures)):
            return []
        return [
            replace(ended, error="its function returned while others waited for it")
            for rank, outcome in sorted(self.outcomes.items())
            if isinstance(outcome, Result)
            if (ended := self.group.ranks[rank].exit_failure()) is not None
            if not ended.exit_code
        ]

    def explained(self, failure: Failure) -> Failure:
        """Return the failure with the rank's last output and the line at which it crashed."""
        worker = self.group.ranks[failure.rank]
        report = self.folder / f"failure{failure.rank}.json"
        return with_crash(worker.with_output(failure), report)

    def _show_new_lines(self) -> None:
        for worker in self.group.ranks if self.on_line else ():
            if worker.log is None:
                continue
            start = self.read_bytes.get(worker.rank, worker.log_start_bytes)
            with worker.log.open("rb") as file:
                file.seek(start)
                data = file.read()
            if worker.is_running:  # a line still being written waits for its end
                data = data[: data.rfind(b"\n") + 1]
            self.read_bytes[worker.rank] = start + len(data)
            for line in data.decode(errors="replace").splitlines():
                assert self.on_line is not None
                self.on_line(worker.rank, line)
