"""Ranks as threads of one process, of which one runs at a time.

One rule: a rank runs until it must wait, and then hands over to the one that has been ready
longest. So a run is the same each time, nobody races for what a process has only once (each
rank has its own random numbers and its own record of calls), and when nobody is ready and nobody
runs, nobody ever will be. A rank that computes for long, or waits for something else than a
call, loses its turn: the others go on, and it lines up again when it makes a call.
"""

import ctypes
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from torchdistpackage.comm.flight_recorder import FlightRecorder, recorder
from torchdistpackage.harness.lint.matcher import Disagreement, LintGroup, Matcher, PendingOp
from torchdistpackage.harness.lint.report import Finding, Name, disagreement, stack, stuck, waits
from torchdistpackage.harness.lint.stacks import stack_of

PATIENCE_S = 5.0
"""After so long without a call of the one that runs, its turn goes to the next one."""
GRACE_S = 2.0
"""How long a thread that is told to end may take."""


class LintEnded(BaseException):
    """The lint is over: this rank has nothing more to do. No Exception, so that a step's own
    handlers let it pass."""


class Threads:
    """Runs one function on every rank. `board` is where their calls meet.

    limit_s: wall time for all of it.
    """

    def __init__(self, num_ranks: int, board: Matcher, name: Name, limit_s: float):
        self.board, self._name, self._limit_s = board, name, limit_s
        self._patience_s = min(PATIENCE_S, limit_s / 4)
        self.finding: Finding | None = None
        self.groups: list[LintGroup] = []
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._turns = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._ready = deque(range(num_ranks))
        self._running: dict[int, float] = {}
        self._lapsed: set[int] = set()
        self._over = False
        self._carried = [_Carried(vars(_recorder())) for _ in range(num_ranks)]
        self._threads: list[threading.Thread] = []

    def run(self, body: Callable[[int], object]) -> list[object]:
        """What `body(rank)` returned on each rank; None where it did not. Never hangs."""
        results: list[object] = [None] * len(self._turns)
        kept = _Carried(vars(recorder))

        def main(rank: int) -> None:
            self._turns[rank].acquire()
            self._carried[rank].load()
            try:
                self.alive()
                with torch.autograd.set_multithreading_enabled(False):
                    results[rank] = body(rank)
            except LintEnded:
                pass
            except BaseException as error:  # a rank's own SystemExit is its end too
                self._raised(rank, error)
            finally:
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
            kept.load()
        return results

    # -- what a rank's thread calls ----------------------------------------------------

    def alive(self) -> None:
        """Leave this thread if the lint is over."""
        if self._over:
            raise LintEnded

    def act(self, rank: int, action: Callable[[], None]) -> None:
        """Do something with the board."""
        self._line_up(rank)
        with self.lock:
            self.alive()
            try:
                action()
            except Disagreement as found:
                self._finish(disagreement(found, self._name))
                raise LintEnded from None

    def wait(self, rank: int, entry: PendingOp) -> None:
        """Return when the entry is done; let others run until then."""
        self._line_up(rank)
        with self.lock:
            self.alive()
            if entry.done:
                return
            self.board.waiting[rank] = entry
        self._hand_over(rank)

    def pause(self, rank: int) -> None:
        """Let the others run first: what a rank does that only asks whether a call is done."""
        self._line_up(rank)
        with self.lock:
            self.alive()
            if not self._ready:
                return
            self._ready.append(rank)
        self._hand_over(rank)

    def done(self, entry: PendingOp) -> None:
        """The board says so, from inside `act`."""
        entry.payload = None
        if self.board.waiting.get(entry.rank) is entry:
            del self.board.waiting[entry.rank]
            self._ready.append(entry.rank)

    # -- turns -------------------------------------------------------------------------

    def _hand_over(self, rank: int) -> None:
        self._carried[rank].save()
        with self.lock:
            self._running.pop(rank, None)
            self._next()
        self._take_turn(rank)

    def _line_up(self, rank: int) -> None:
        """Go on when it is this rank's turn again, if it has lost it."""
        with self.lock:
            if rank not in self._lapsed:
                return
            self._lapsed.remove(rank)
            self._ready.append(rank)
            self._next()
        self._take_turn(rank)

    def _take_turn(self, rank: int) -> None:
        self._turns[rank].acquire()
        self._carried[rank].load()
        self.alive()

    def _next(self) -> None:
        """Give the turn to the next one, if nobody has it; with the lock held."""
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
        with self.lock:
            self.board.ended.add(rank)
            self._running.pop(rank, None)
            self._lapsed.discard(rank)
            if len(self.board.ended) == len(self._turns) and not self._over:
                left = self.board.leftovers(self.groups)
                self._finish(stuck(self.board, left, self._name) if left else None)
            self._next()

    def _raised(self, rank: int, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error)).rstrip()
        with self.lock:
            others = waits(self.board, self._name)
            told = f"{self._name(rank)} raised {type(error).__name__}: {error}\n{text}"
            if others:
                told += f"\nmeanwhile\n{others}"
            self._finish(Finding("exception", (rank,), told))

    def _finish(self, finding: Finding | None) -> None:
        """The first finding counts; all threads come to their end."""
        if not self._over:
            self._over, self.finding = True, finding
            for turn in self._turns:
                turn.release()
        self._changed.notify_all()

    # -- the thread that watches -------------------------------------------------------

    def _watch(self) -> None:
        end = time.monotonic() + self._limit_s
        with self.lock:
            self._next()
            while not self._over:
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
        running = sorted((*self._running, *self._lapsed))
        who = ", ".join(map(self._name, running)) or "nobody"
        lines = [f"not done after {self._limit_s:g} s: {who} computes, or waits outside of calls"]
        lines += [
            f"stack of {self._name(rank)}:\n{stack(stack_of(self._threads[rank]))}"
            for rank in running
        ]
        if others := waits(self.board, self._name):
            lines.append(f"the others:\n{others}")
        return Finding("time", tuple(running), "\n".join(lines))

    def _stop(self) -> None:
        """No thread stays: who still computes gets `LintEnded` at its next step in Python."""
        with self.lock:
            self._finish(None)
        end = time.monotonic() + GRACE_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(0.05)
            if thread.is_alive() and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident), ctypes.py_object(LintEnded)
                )
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(end - time.monotonic(), 0.0))


class _Carried:
    """What a process has once and each rank should have for itself; first as it is now."""

    def __init__(self, record: dict[str, object]):
        self._record = record
        self.save()

    def save(self) -> None:
        self._torch, self._python = torch.get_rng_state(), random.getstate()
        self._numpy = np.random.get_state()

    def load(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        recorder.__dict__ = self._record


def _recorder() -> FlightRecorder:
    fresh = FlightRecorder()
    fresh.checks = recorder.checks
    return fresh
