"""Work of one rank, run at once or in a thread beside the steps, with its result or error."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar, cast

from torchdistpackage.comm.flight_recorder import recorder

_NICENESS = 19
"""Niceness of a thread that writes beside the steps, which come first if cores are scarce. A rank
that waits for the thread, at a second save or at the end, leaves it a core."""

T = TypeVar("T")


class LocalWork(Generic[T]):
    """Work of one rank without collectives, run at once or in a thread, and its result or error."""

    def __init__(self, work: Callable[[], T], *, in_thread: bool):
        self._work = work
        self.error: Exception | None = None
        self._result: T | None = None
        self._thread: threading.Thread | None = None
        if in_thread:
            # a daemon, so that a slow disk cannot keep a rank alive that ends with an error
            self._thread = threading.Thread(target=self._run_nice, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            with recorder.apart():
                self._run()

    @property
    def is_done(self) -> bool:
        """True if the work has ended, with a result or an error."""
        return self._thread is None or not self._thread.is_alive()

    def result(self) -> T:
        """Wait for the work; return its result or raise its error."""
        if self._thread is not None:
            # the result and the error are set only when the thread ends
            with recorder.apart():
                self._thread.join()
        if self.error is not None:
            raise self.error
        return cast(T, self._result)

    def _run_nice(self) -> None:
        """Run the work in this thread at low priority."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        self._run()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self.error = error
