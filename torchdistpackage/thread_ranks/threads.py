"""Ranks as threads of one process, of which one runs at a time.

A rank runs until it must wait, and then hands over to the rank that has been ready longest. So each
run is the same, ranks do not race for state that a process has only once (each has its own random
numbers, record of calls and world of torch.distributed), and a deadlock is certain as soon as no
rank is ready and none runs. A rank that computes for long, or waits for something other than a
call, loses its turn: the others go on, and it queues again at its next call.
"""

import ctypes
import random
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from torchdistpackage.comm.flight_recorder import FlightRecorder, recorder
from torchdistpackage.errors import CommError
from torchdistpackage.thread_ranks.findings import (
    Finding,
    Name,
    disagreement,
    stuck,
    waits,
    with_stacks,
)
from torchdistpackage.thread_ranks.matcher import (
    Disagreement,
    LintGroup,
    Matcher,
    PendingOp,
    stack_of,
)

PATIENCE_S = 5.0
"""Seconds without a call after which a running rank loses its turn."""
GRACE_S = 2.0
"""Seconds that threads get to end after they are told to."""


class LintEnded(BaseException):
    """The signal that a run is over; no Exception, so that a step's own handlers ignore it."""


class Threads:
    """A run of one function on every rank, for at most `limit_s`; their calls meet on `board`."""

    def __init__(self, num_ranks: int, board: Matcher, name: Name, limit_s: float):
        self.board, self._name, self._limit_s = board, name, limit_s
        self._patience_s = min(PATIENCE_S, limit_s / 4)
        self.finding: Finding | None = None
        self.groups: list[LintGroup] = []
        # protects the board and the turns; reentrant, because an action on the board runs under it
        # and may take it again
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._turns = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._ready = deque(range(num_ranks))
        self._running: dict[int, float] = {}
        self._lapsed: set[int] = set()
        self._over = False
        fresh = [vars(FlightRecorder()) | {"checks": recorder.checks} for _ in range(num_ranks)]
        self._carried = [_Carried(record) for record in fresh]
        self._threads: list[threading.Thread] = []

    def run(self, body: Callable[[int], object]) -> list[object]:
        """Return the result of `body(rank)` of each rank, None if it did not return; never hang."""
        results: list[object] = [None] * len(self._turns)
        outer_state = _Carried(vars(recorder))

        def main(rank: int) -> None:
            self._turns[rank].acquire()
            self._carried[rank].load()
            try:
                self.alive()
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = body(rank)
            except LintEnded:
                pass
            except BaseException as error:  # SystemExit too: it would end the thread silently
                self._raised(rank, error)
            finally:
                with suppress(LintEnded):
                    self._end(rank)

        self._threads = [
            threading.Thread(target=main, args=(rank,), name=f"rank {rank}", daemon=True)
            for rank in range(len(self._turns))
        ]
        try:
            for thread in self._threads:
                thread.start()
            self._watch()
        finally:
            self._stop()
            outer_state.load()
        return results

    # -- what a rank's thread calls ----------------------------------------------------

    def alive(self) -> None:
        """Raise `LintEnded` if the run is over."""
        if self._over:
            raise LintEnded

    def act(self, rank: int, action: Callable[[], None]) -> None:
        """Run an action on the board, under the lock."""
        self._line_up(rank)
        with self.lock:
            self.alive()
            try:
                action()
            except Disagreement as mismatch:
                self._finish(disagreement(mismatch, self._name))
                raise LintEnded from None

    def wait(self, rank: int, entry: PendingOp) -> None:
        """Wait until the entry is done; let other ranks run until then."""
        self._line_up(rank)
        with self.lock:
            self.alive()
            if entry.done:
                return
            self.board.waiting[rank] = entry
        self._hand_over(rank)

    def pause(self, rank: int) -> None:
        """Let the other ranks run first, for a rank that polls whether a call is done."""
        self._line_up(rank)
        with self.lock:
            self.alive()
            if not self._ready:
                return
            self._ready.append(rank)
        self._hand_over(rank)

    def done(self, entry: PendingOp) -> None:
        """Make the rank ready that waits for this entry; the board calls it inside `act`."""
        entry.payload = None
        if self.board.waiting.get(entry.rank) is entry:
            del self.board.waiting[entry.rank]
            self._ready.append(entry.rank)

    # -- turns -------------------------------------------------------------------------

    def _hand_over(self, rank: int) -> None:
        """Give the turn to another rank, and wait for the next one."""
        self._carried[rank].save()
        with self.lock:
            self._running.pop(rank, None)
            self._next()
        self._take_turn(rank)

    def _line_up(self, rank: int) -> None:
        """Wait for a new turn if this rank has lost its turn."""
        with self.lock:
            if rank not in self._lapsed:
                return
            self._lapsed.remove(rank)
            self._ready.append(rank)
            self._next()
        self._take_turn(rank)

    def _take_turn(self, rank: int) -> None:
        """Wait for the turn, and load this rank's state."""
        # released by `_next`, which lets one rank run at a time, or by `_finish` at the end
        self._turns[rank].acquire()
        self._carried[rank].load()
        self.alive()

    def _next(self) -> None:
        """Give the turn to the next ready rank if no rank has it; the lock is held."""
        if self._over or self._running:
            return
        if self._ready:
            rank = self._ready.popleft()
            self._running[rank] = time.monotonic()
            self._turns[rank].release()
        elif self.board.waiting and not self._lapsed:
            entries = [self.board.waiting[rank] for rank in sorted(self.board.waiting)]
            self._finish(stuck(self.board, entries, self._name))

    def _end(self, rank: int) -> None:
        """End a rank; the last one checks for calls that never met."""
        with self.lock:
            self.board.ended.add(rank)
            self._running.pop(rank, None)
            self._lapsed.discard(rank)
            if len(self.board.ended) == len(self._turns) and not self._over:
                unmet = self.board.leftovers(self.groups)
                self._finish(stuck(self.board, unmet, self._name) if unmet else None)
            self._next()

    def _raised(self, rank: int, error: BaseException) -> None:
        """End the run because a rank raised an error."""
        trace = "".join(traceback.format_exception(error)).rstrip()
        text = f"{self._name(rank)} raised {type(error).__name__}: {error}\n{trace}"
        with self.lock:
            if others := waits(self.board, self._name):
                text += f"\nmeanwhile\n{others}"
            self._finish(Finding("exception", (rank,), text))

    def _finish(self, finding: Finding | None) -> None:
        """Store the first finding, and wake all threads so that they end."""
        if not self._over:
            self._over, self.finding = True, finding
            for turn in self._turns:
                turn.release()
        self._changed.notify_all()

    # -- the thread that watches -------------------------------------------------------

    def _watch(self) -> None:
        """Wait for the end, and take the turn from a rank that computes for long."""
        end = time.monotonic() + self._limit_s
        with self.lock:
            self._next()
            while not self._over:
                # woken by `_finish`; the timeout is for looking at ranks that compute for long
                self._changed.wait(self._patience_s / 2)
                now = time.monotonic()
                if now > end and not self._over:
                    self._finish(self._late())
                elif self._ready:
                    for rank, since in tuple(self._running.items()):
                        if now - since > self._patience_s:
                            self._carried[rank].save()
                            del self._running[rank]
                            self._lapsed.add(rank)
                    self._next()

    def _late(self) -> Finding:
        """Return the finding about a run that passed its time limit."""
        running = sorted((*self._running, *self._lapsed))
        who = ", ".join(map(self._name, running)) or "no rank"
        head = f"not done after {self._limit_s:g} s: {who} computes, or waits outside of calls"
        text = with_stacks(head, [(r, stack_of(self._threads[r])) for r in running], self._name)
        if others := waits(self.board, self._name):
            text += f"\nthe others:\n{others}"
        return Finding("time", tuple(running), text)

    def _stop(self) -> None:
        """End all threads: one that still computes gets `LintEnded` at its next step in Python.

        It sends the exception repeatedly, because a callback of the interpreter, such as that of a
        weak reference, swallows one.
        """
        with self.lock:
            self._finish(None)
        end = time.monotonic() + GRACE_S
        with _callbacks_may_end():
            for thread in self._threads:
                if thread.ident is None:
                    continue
                thread.join(0.05)
                while thread.is_alive() and time.monotonic() < end:
                    ident, ended = ctypes.c_ulong(thread.ident), ctypes.py_object(LintEnded)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ended)
                    thread.join(0.25)


@contextmanager
def _callbacks_may_end() -> Iterator[None]:
    """Do not report a `LintEnded` that a callback of the interpreter has swallowed."""
    previous_hook = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is not LintEnded:
            previous_hook(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook


class _Carried:
    """A rank's own copy of the state that a process has once; at first the current one."""

    def __init__(self, record: dict[str, object]):
        self._record = record
        self.save()

    def save(self) -> None:
        """Save the state of the rank whose turn ends."""
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy = np.random.get_state()

    def load(self) -> None:
        """Load the state of the rank whose turn begins."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        recorder.__dict__ = self._record


# -- what torch has once for a process ------------------------------------------------------

# two sets of thread ranks would replace each other's world of torch.distributed
_one_at_a_time = threading.Lock()


class _RankWorld:
    """torch's records about the groups of one rank."""

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg",
                     "pg_to_tag", "pg_coalesce_state", "pg_flight_recorder_hooks"):  # fmt: skip
            setattr(self, name, {})
        self.group_count, self.comms = 0, []

    # torch computes this from the fields above
    pg_config_info = distributed_c10d._World.pg_config_info


class _Worlds:
    """A replacement of torch's world in which every thread sees its own."""

    def __init__(self, world: object):
        object.__setattr__(self, "_own", world)
        object.__setattr__(self, "_local", threading.local())

    def enter(self) -> None:
        """Make this thread a rank from now on."""
        self._local.world = _RankWorld()

    def _mine(self) -> object:
        """Return the world of this thread."""
        return getattr(self._local, "world", self._own)

    def __getattr__(self, name: str) -> object:
        return getattr(self._mine(), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._mine(), name, value)


@contextmanager
def worlds() -> Iterator[_Worlds]:
    """Give threads that `enter` a world of torch.distributed of their own inside the block."""
    # no waiting: if the caller is such a rank itself, the other set would never end
    if not _one_at_a_time.acquire(blocking=False):
        raise CommError("ranks already run as threads of this process; wait for them to end first")
    own_world, hook = distributed_c10d._world, sys.excepthook
    method = distributed_c10d._default_pg_init_method
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    worlds_of_threads = _Worlds(own_world)
    try:
        distributed_c10d._world = worlds_of_threads  # type: ignore[assignment]
        isolate(True)
        yield worlds_of_threads
    finally:
        isolate(False)
        distributed_c10d._world = own_world
        distributed_c10d._default_pg_init_method = method
        sys.excepthook = hook
        rank = own_world.default_pg.rank() if own_world.default_pg is not None else -1
        torch._C._distributed_c10d._set_global_rank(rank)
        _one_at_a_time.release()


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restore the process-wide settings that a step commonly changes."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        cudnn.deterministic, cudnn.benchmark = flags
        torch.set_float32_matmul_precision(precision)
