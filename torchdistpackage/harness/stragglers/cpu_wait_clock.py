"""A clock that stands still while a thread could run but all cores are taken.

What a rank computes takes as long as it takes; when it gets a core is decided by whatever else
runs on the host. Linux counts the second for each thread, in nanoseconds. No torch.
"""

import os
import time
import weakref
from collections.abc import Callable

_now_s = time.monotonic


def cpu_wait_clock() -> Callable[[], float]:
    """Seconds of the wall clock less those in which the calling thread waited for a core.

    The wall clock alone where the system does not count them.
    """
    try:
        return _Running(os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return _now_s


class _Running:
    """Reads one file of three numbers: nanoseconds on a core, in a queue for one, time slices."""

    def __init__(self, file: int):
        self._file = file
        weakref.finalize(self, os.close, file)

    def __call__(self) -> float:
        try:
            return _now_s() - int(os.pread(self._file, 64, 0).split()[1]) * 1e-9
        except ProcessLookupError:
            return _now_s()  # the thread has ended, and somebody else asks
