"""A network test that may get stuck, and the ranks' common decision about its outcome.

`run_guarded` runs it in a thread, which is abandoned in a call that does not return. All ranks
decide on the outcome over the default store, so that a stuck group delays none.
"""

import contextvars
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives
from torchdistpackage.comm.backends import backend_of
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.comm.primitives import Group, set_timeout
from torchdistpackage.errors import CommError
from torchdistpackage.harness.comm_test_report import (
    CommTestError,
    RankReport,
    StuckAt,
    Verdict,
    judge,
)

Answer = TypeVar("Answer")

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.1


def run_guarded(
    function: Callable[["GuardedThread"], object],
    status: "SharedStatus",
    group: Group,
    *,
    limit_s: float,
    step_s: float,
    settle_s: float,
    look_s: float,
    alike: tuple[type[Exception], ...] = (),
    title: str = "",
) -> Verdict:
    """Run `function` in a thread on all ranks, and return the verdict that they agree on.

    `function` calls `begin` of its thread before each step.

    limit_s: time limit of a step and the decision, as errors name it. step_s: of a step. settle_s:
    time for the ranks to decide. look_s: time between looks at the thread. alike: errors that all
    ranks raise alike, and that are raised here. title: of the error.

    Raises:
        CommTestError: a rank did not come through a step, failed, or found something wrong; on all
            ranks alike. Or the store does not answer.
    """
    thread = GuardedThread(function, group)
    report = thread.report(status.alarmed, step_s=step_s, settle_s=settle_s / 4, look_s=look_s)
    if isinstance(thread.failure, alike):
        raise thread.failure
    # a rank that could not go on waits only for those whom the alarm calls
    wait_s = 0.0 if report.stop else limit_s
    verdict = status.meet(
        "the end of the test", report, limit_s=limit_s, wait_s=wait_s, settle_s=settle_s
    )
    verdict.raise_problems(title)
    return verdict


class _Step(NamedTuple):
    number: int
    what: str
    ranks: tuple[int, ...]
    since_s: float


class GuardedThread:
    """Run `function` in a thread, with the caller's tpc and on the device of `group`.

    wrong, times_s: set by the function, for the report. failure: the exception it raised.
    """

    def __init__(self, function: Callable[["GuardedThread"], object], group: Group) -> None:
        self.wrong: list[str] = []
        self.times_s: list[float] = []
        self.failure: Exception | None = None
        self._step = _Step(0, "the start", (), time.monotonic())
        # an event, so that the watching thread wakes as soon as the function ends
        self._ended, self._is_left = threading.Event(), False
        self._function, self._device = function, primitives.device_of(group)
        # tpc belongs to a context, and a thread begins in an empty one
        run = contextvars.copy_context().run
        threading.Thread(target=run, args=(self._go,), name="guarded", daemon=True).start()

    def begin(self, step_name: str, ranks: tuple[int, ...]) -> None:
        """Begin a step of `ranks`; called in the thread."""
        if self._is_left:
            raise CommError(f"{step_name}: this rank has given up")
        self._step = _Step(self._step.number + 1, step_name, ranks, time.monotonic())

    def report(
        self, is_alarmed: Callable[[], bool], *, step_s: float, settle_s: float, look_s: float
    ) -> RankReport:
        """Wait until the function ends or a step takes longer than `step_s`; return a report.

        is_alarmed: returns at once whether another rank has waited in vain.
        settle_s: time for the current step after such an alarm.
        """
        alarm_s = float("inf")
        # woken at the end of the function; the timeout is for looking at alarms and slow steps
        while not self._ended.wait(look_s):
            now_s = time.monotonic()
            if alarm_s > now_s and is_alarmed():
                alarm_s = now_s
            if now_s - self._step.since_s > step_s or now_s - alarm_s > settle_s:
                break
        self._is_left = True
        stop, at, failure = None, self._step, self.failure
        if failure is not None or not self._ended.is_set():
            error = "" if failure is None else str(failure) or type(failure).__name__
            stop = StuckAt(at.number, at.what, at.ranks, error.partition("\n")[0])
        return RankReport(tuple(self.wrong), stop, tuple(self.times_s))

    def _go(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # a thread begins on the first one
        try:
            self._function(self)
        except Exception as error:  # for the thread that watches
            self.failure = error
        self._ended.set()


@contextmanager
def limited(groups: Iterable[Group], seconds: float) -> Iterator[None]:
    """Limit operations that begin in the block to `seconds`; afterwards the previous limits apply
    again.

    Only gloo's groups get the limit, whose operation then fails and can be reported. NCCL's
    watchdog would end the process; there the caller keeps time itself.
    """
    previous = []
    for group in {group for group in groups if backend_of(group) == "gloo"}:
        limit = group._get_backend(torch.device("cpu")).options._timeout
        previous.append((group, limit, state_of(group).limit))
        set_timeout(group, seconds)
    try:
        yield
    finally:
        for group, limit, recorded in previous:
            set_timeout(group, limit.total_seconds())
            state_of(group).limit = recorded


class SharedStatus:
    """A meeting of all ranks of the default group, in the same order on each.

    No rank waits for ever, not even for the store, which lives in a process that may itself be
    stopped: threads ask it over a connection of their own, and waits for them have a time limit. At
    a meeting one rank decides for all: the last to come, or the first that has waited in vain.

    topic: a name for it; one that comes again gets new keys.
    """

    def __init__(self, topic: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._default = dist.distributed_c10d._get_default_store()
        self._topic, self._prefix = topic, ""
        self._store: dist.Store | None = None
        self._lock = threading.Lock()  # one connection to the store answers one question at a time
        self._glance: Future[bool] | None = None
        self._alarmed = False

    def meet(
        self,
        point: str,
        report: RankReport,
        *,
        limit_s: float,
        wait_s: float,
        settle_s: float,
    ) -> Verdict:
        """Leave `report`, and return the verdict when all have come or time is up.

        point: its name. limit_s: as the verdict names it. wait_s: for the others. settle_s: then
        for those who hear the alarm.

        Raises:
            CommTestError: the store does not answer.
        """

        def decide(store: dist.Store) -> None:
            if store.add(self._key(point, "decided"), 1) == 1:
                keys = {rank: self._key(point, rank) for rank in range(self.size)}
                values = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
                verdict = judge(
                    {rank: RankReport.from_json(text) for rank, text in values.items()},
                    lambda rank: self._host(store, rank),
                    world_size=self.size,
                    limit_s=limit_s,
                    meeting=point,
                )
                store.set(self._key(point, "verdict"), verdict.to_json())

        def attend(store: dist.Store) -> bytes | None:
            store.set(self._key(point, self.rank), report.to_json())
            if store.add(self._key(point, "came"), 1) == self.size:
                decide(store)
            verdict = self._verdict(store, point, wait_s)
            if verdict is None:
                store.set(self._key("alarm"), "yes")
                verdict = self._verdict(store, point, settle_s)
            if verdict is None:
                decide(store)
                verdict = self._verdict(store, point, settle_s)
            return verdict

        def lost(why: str) -> CommTestError:
            where = f"; it was in {report.stop.what}" if report.stop else ""
            return CommTestError(f"rank {self.rank} on {socket.gethostname()}: {why}{where}")

        within_s = wait_s + 3 * settle_s
        try:
            text = self._ask(attend).result(within_s)
        except (RuntimeError, TimeoutError) as error:
            silent = isinstance(error, TimeoutError)
            trouble = f"does not answer within {within_s:.1f} s" if silent else "is gone"
            raise lost(
                f"{self._keeper()} {trouble}, so the ranks cannot tell each other how it went; see "
                f"whether rank 0 still runs"
            ) from error
        if text is None:
            raise lost(
                "the rank that reports the result ended before its report; look at the logs of "
                "the other ranks"
            )
        return Verdict.from_json(text)

    def alarmed(self) -> bool:
        """Return whether a rank has waited in vain, or the store is gone. Never waits."""
        if self._glance is None:
            self._glance = self._ask(lambda store: store.check([self._key("alarm")]))
        elif self._glance.done():
            self._alarmed |= self._glance.exception() is not None or self._glance.result()
            self._glance = None
        return self._alarmed

    def _ask(self, question: Callable[[dist.Store], Answer]) -> "Future[Answer]":
        """Ask the store in a daemon thread, so that a dead store cannot block; return a future."""
        future: Future[Answer] = Future()

        def task() -> None:
            try:
                # a store handles one request at a time, and two threads may ask
                with self._lock:
                    future.set_result(question(self._opened()))
            except RuntimeError as error:  # a store that is gone
                future.set_exception(error)

        threading.Thread(target=task, name=f"status {self._topic}", daemon=True).start()
        return future

    # in the thread

    def _opened(self) -> dist.Store:
        if self._store is None:
            store = self._default.clone()
            number = store.add(f"{self._topic}/times/{self.rank}", 1)
            self._prefix, self._store = f"{self._topic}/{number}", store
            store.set(self._key("host", self.rank), socket.gethostname())
        return self._store

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))

    def _verdict(self, store: dist.Store, point: str, wait_s: float) -> bytes | None:
        # polls, because a wait of torch that times out writes to stderr
        key, end_s, pause_s = self._key(point, "verdict"), time.monotonic() + wait_s, 0.0
        while not store.check([key]):
            if time.monotonic() > end_s:
                return None
            pause_s = min(max(2 * pause_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
            # pauses grow, so that thousands of waiting ranks do not keep the store busy
            time.sleep(pause_s)
        return store.get(key)

    def _host(self, store: dist.Store, rank: int) -> str:
        if store.check([key := self._key("host", rank)]):
            return store.get(key).decode()
        # a rank that has not come yet signed in when the ranks met (comm/rendezvous_store.py)
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
            if store.check([f"here/{rank}"]):
                return store.get(f"here/{rank}").decode()
        return ""

    def _keeper(self) -> str:
        store = self._default
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if isinstance(store, dist.FileStore):
            return f"the store in the file {store.path}"
        where = f" at {store.host}:{store.port}" if isinstance(store, dist.TCPStore) else ""
        return f"the store{where}, which rank 0 keeps (under torchrun its agent),"
