"""What one rank does by itself, now or in a thread beside the steps, and how it ended."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar, cast

_NICENESS = 19
"""Of a thread that writes beside the steps: they come first where cores are short. Who waits for it
(a second save, the end) leaves it a core."""

T = TypeVar("T")


class LocalWork(Generic[T]):
    """What one rank does by itself, now or in a thread, and how it ended."""

    def __init__(self, work: Callable[[], T], *, in_thread: bool):
        self._work = work
        self.error: Exception | None = None
        self._result: T | None = None
        self._thread: threading.Thread | None = None
        if in_thread:
            # a daemon: a rank that ends with an error is not kept by a slow disk
            self._thread = threading.Thread(target=self._run_nice, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._run()

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def result(self) -> T:
        """What the work returned; raises what it raised. Waits for it."""
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise self.error
        return cast(T, self._result)

    def _run_nice(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._run()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self.error = error
