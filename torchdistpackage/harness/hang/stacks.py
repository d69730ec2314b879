"""Stacks of a rank: read where its loop is, and have faulthandler write them. No torch.

On a device a backward and its hooks run in threads of autograd, which Python did not start: a loop
that stands in autograd's engine is where such a thread is. A host that only issues kernels stands
in torch for long when the queue of launches is full: then it waits as well.
"""

import faulthandler
import os
import re
import threading
from collections.abc import Callable, Sequence
from weakref import WeakMethod

FOREIGN = "a thread that Python did not start, as autograd's of a device"
"""Heading of the stack of a thread that Python did not start."""
HELD_S = 3.0
"""Seconds at least after which the stacks of a held interpreter are written."""


def loop_of(stacks: Sequence[str]) -> str:
    """Return the stack in which the training loop runs: the first one, or that of autograd's
    thread.
    """
    if not stacks:
        return ""
    if _ENGINE.search(_frames(stacks[0])[-1]):
        foreign = [text for text in stacks[1:] if text.startswith(FOREIGN)]
        return next(
            (text for text in foreign if not _waits(text, True)), *foreign[:1] or stacks[:1]
        )
    return stacks[0]


def innermost(stacks: Sequence[str]) -> str:
    """Return where the loop is, such as `"loader.py", line 31, in batch`.

    A place in a library is returned only if there is no other.
    """
    lines = [x.strip() for x in loop_of(stacks).splitlines()]
    places = [x.removeprefix("File ") for x in lines if x.startswith("File ")]
    user_places = [location for location in places if not _LIBRARY.search(location)]
    return next(iter([*user_places[-1:], *places[-1:]]), "")


def is_waiting(stacks: Sequence[str], *, on_device: bool = False) -> bool:
    """Return whether the loop is in a call that waits for other ranks or for its device.

    on_device: it issues its work to one.
    """
    return _waits(loop_of(stacks), on_device)


def _waits(text: str, on_device: bool) -> bool:
    frames = _frames(text)
    if _COLLECTIVE.search("".join(frames[-3:])) or _DEVICE.search(frames[-1]):
        return True
    return on_device and bool(_READS.search(frames[-1]) or _LAUNCHES.search(frames[-1]))


def _frames(text: str) -> list[str]:
    return re.split(r"^  (?=File )", text, flags=re.MULTILINE)


_ENGINE = re.compile(r"\bin _engine_run_backward$", re.MULTILINE)
_COLLECTIVE = re.compile(r"/torch/distributed/")
_DEVICE = re.compile(
    r"\.(item|tolist|cpu|synchronize|wait_stream)\(|\bin synchronize$", re.MULTILINE
)
_READS = re.compile(r"\b(float|int|bool)\(|\.(to|cuda|numpy|nonzero|copy_|unique|equal)\(")
"""Calls that read a number from the device, or copy from unpinned memory, and therefore wait for
it."""
_LAUNCHES = re.compile(r"/torch/(nn|optim|autograd|_tensor|functional|_ops|utils/_foreach)")
_LIBRARY = re.compile(r'/lib/python3[.\d]*/|^"<')


class CStacks:
    """Stacks that the C side of faulthandler writes when Python does not run, or crashes.

    The timer is off in a fork: its thread is not there in the child, which would wait for it for
    ever at its end. enabled: whether faulthandler and its one timer are ours to use. held_s: how
    long no Python has run when they are written.
    """

    def __init__(self, *, enabled: bool, held_s: float = HELD_S) -> None:
        self._enabled, self._held_s = enabled, held_s
        self._fd, self._tells_crashes = -1, False
        # arming and closing must not interleave, and a fork must not copy a running timer
        self._lock = threading.Lock()

    def open(self, fd: int) -> None:
        """Write to `fd` from now on; `close` closes it."""
        self._fd = fd
        # a crash leaves its stacks too, unless the user has them written elsewhere
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
        """Restart the timer after which faulthandler writes the stacks."""
        # a fork must not happen while the timer changes, or the child would inherit half of it
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
            faulthandler.dump_traceback_later(self._held_s, file=self._fd)

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
        # nothing may start a dump until the fork is over: the child must not inherit half of one
        self._lock.acquire()
        self._stop()

    def _after_in_parent(self) -> None:
        self._start()
        self._lock.release()

    def _after_in_child(self) -> None:
        self._forget()
        self._lock.release()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `method` without keeping its object alive.

    The registration lasts as long as the process, and the object need not.
    """
    reference = WeakMethod(method)
    return lambda: (reference() or (lambda: None))()
