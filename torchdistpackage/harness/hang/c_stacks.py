"""Stacks that the C side of faulthandler writes when Python does not run, or crashes. No torch.

One rule: a fork finds the timer off. Its thread is not there in the child, which would wait for it
for ever at its end; the parent starts it again.
"""

import faulthandler
import os
import threading
from collections.abc import Callable
from weakref import WeakMethod

HELD_S = 3.0
"""After which the stacks of an interpreter that is held are written."""


class CStacks:
    """enabled: whether faulthandler and its one timer are ours to use."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled, self._fd, self._tells_crashes = enabled, -1, False
        self._lock = threading.Lock()

    def open(self, fd: int) -> None:
        """Write to `fd` from now on, which is closed by `close`."""
        self._fd = fd
        # a crash as well leaves its stacks, unless the user has it told elsewhere
        self._tells_crashes = self._enabled and not faulthandler.is_enabled()
        if self._tells_crashes:
            faulthandler.enable(fd)
        os.register_at_fork(
            before=_weakly(self._before_fork),
            after_in_parent=_weakly(self._after_in_parent),
            after_in_child=_weakly(self._after_in_child),
        )
        self.arm()

    def arm(self) -> None:
        """If nobody comes here again in time, C writes the stacks."""
        with self._lock:
            self._start()

    def close(self) -> None:
        with self._lock:
            self._stop()
            self._forget()

    def _start(self) -> None:
        if self._fd >= 0 and self._enabled:
            if os.fstat(self._fd).st_size:
                os.ftruncate(self._fd, 0)
            faulthandler.dump_traceback_later(HELD_S, file=self._fd)

    def _stop(self) -> None:
        if self._fd >= 0 and self._enabled:
            faulthandler.cancel_dump_traceback_later()

    def _forget(self) -> None:
        if self._fd >= 0:
            if self._tells_crashes:
                faulthandler.disable()
            os.close(self._fd)
            self._fd = -1

    def _before_fork(self) -> None:
        self._lock.acquire()
        self._stop()

    def _after_in_parent(self) -> None:
        self._start()
        self._lock.release()

    def _after_in_child(self) -> None:
        self._forget()
        self._lock.release()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """What is registered stays for the life of the process; its object need not."""
    known = WeakMethod(method)

    def call() -> None:
        if (found := known()) is not None:
            found()

    return call
