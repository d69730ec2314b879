"""Processes of this machine: their state in /proc, recorded signals, and checks before a fork.

A signal handler only records the signal: the process acts on it at points where it can, because
every process that shares a step must agree first.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from torchdistpackage.errors import LaunchError

STOPPED = ("T", "t")
"""States in /proc of a stopped process: by a signal, and by a debugger."""
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_NOT_INITIALIZED, _NO_DEVICE = 3, 100


class Interrupted(BaseException):
    """Raised when a signal arrives inside `SignalFlag.interrupting`."""


class SignalFlag:
    """The signals received since `listen`, in order. A fork inherits the handlers."""

    def __init__(self) -> None:
        self.all_received: list[signal.Signals] = []
        self._interrupts = False

    def listen(self, names: Sequence[str]) -> None:
        """Record the signals `names` ("USR1", "TERM", ...) from now on, in the main thread.

        Raises:
            LaunchError: called in another thread, where Python takes no signals.
        """
        try:
            for name in names:
                signal.signal(signal.Signals[f"SIG{name}"], self._note)
        except ValueError as error:
            raise LaunchError(
                f"signals {', '.join(names)} can only be noted in the main thread; start the run "
                f"there, or set launch.requeue.signals to []"
            ) from error

    @property
    def received(self) -> str:
        """Return the name of the first signal, or ""."""
        return self.all_received[0].name if self.all_received else ""

    @contextmanager
    def interrupting(self) -> Generator[None]:
        """End the block at once on a signal that is listened to, and record the signal. Use it for
        work of one process during which nothing checks the flag.

        Raises:
            Interrupted: one came; later ones are only noted.
        """
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.all_received.append(signal.Signals(signum))
        if self._interrupts:
            self._interrupts = False
            raise Interrupted(self.all_received[-1].name)


class _Undone(BaseException):
    """Raised when a signal came that ends this process."""


@contextmanager
def undone_by_signals() -> Generator[None]:
    """Let SIGTERM and SIGHUP unwind the block as Ctrl-C does, instead of ending this process at
    once. A signal that already has a handler keeps it.
    """
    pending: list[signal.Signals] = []
    received: list[int] = []

    def undo(signum: int, frame: FrameType | None) -> None:
        for name in pending:  # the next one is not waited for
            signal.signal(name, signal.SIG_DFL)
        received.append(signum)
        raise _Undone

    if threading.current_thread() is threading.main_thread():
        signals = (signal.SIGTERM, signal.SIGHUP)
        pending += [x for x in signals if signal.getsignal(x) is signal.SIG_DFL]
        for name in pending:
            signal.signal(name, undo)
    try:
        yield
    except _Undone:
        pass
    finally:
        for name in pending:
            signal.signal(name, signal.SIG_DFL)
        for signum in received:
            signal.raise_signal(signum)


def usable_cpus(env: Mapping[str, str], quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of CPUs that this process may keep busy.

    These are the CPUs it may run on, limited by the quota of its container and its Slurm job's
    share of the node. quota: of cgroup v2, as a container sees it.
    """
    number = len(os.sched_getaffinity(0))
    try:
        most_us, period_us = quota.read_text().split()
        number = min(number, -(-int(most_us) // int(period_us)))
    except (OSError, ValueError):
        pass  # none, or "max"
    if (share := env.get("SLURM_CPUS_ON_NODE", "")).isdecimal():
        number = min(number, int(share))
    return max(number, 1)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; [] if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name in parentheses may have spaces


def stopped(pid: int) -> str:
    """Return the letter of a stopped process's state in /proc, T or t (by a debugger), else ""."""
    letter = "".join(_stat(pid)[:1])
    return letter if letter in STOPPED else ""


def started_ticks(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot; None if it has ended."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def num_threads() -> int:
    """Return the number of threads of this process, also those that Python does not know."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def thread_names() -> str:
    """Return the names of the threads besides the main one, as the kernel and as Python know
    them.
    """
    native = [
        (task / "comm").read_text().strip()
        for task in Path("/proc/self/task").iterdir()
        if task.name != str(os.getpid())
    ]
    python = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    return f"native names {native}, Python names {python}"


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this new fork when `parent` ends, or already has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def name_thread(name: str) -> None:
    """Give this thread a name that ps and top show; that of the main thread is the process's.

    The kernel keeps the first 15 bytes. Threads that start later inherit the name. A space becomes
    a hyphen: Slurm splits /proc/PID/stat at spaces, so a name of two words shifts the fields and
    Slurm finds no process to signal.
    """
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.replace(" ", "-").encode(), 0, 0, 0)


def line_stream(fd: int) -> TextIO:
    """Return a text stream on `fd` that writes each full line at once.

    So the last words of a killed rank are not lost.
    """
    encoding = sys.stderr.encoding
    return os.fdopen(fd, "w", 1, encoding, errors="backslashreplace", closefd=False)


def why_cuda_initialised(open_files: Path = Path("/proc/self/fd")) -> str:
    """Return why the CUDA driver counts as initialized here, so that a fork cannot use it; or "".

    The driver itself is asked: torch knows only what torch did. Nothing is loaded or initialised.
    An open /dev/nvidiactl is no sign: NVML, which is safe before a fork, holds it as well.

    open_files: a folder of links to what this process has open.
    """
    count, answer = ctypes.c_int(), _NOT_INITIALIZED
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
        answer = int(driver.cuDeviceGetCount(ctypes.byref(count)))
    except (OSError, AttributeError):
        pass  # not loaded
    if answer not in (_NOT_INITIALIZED, _NO_DEVICE):
        return f"the CUDA driver is initialised (cuDeviceGetCount returns {answer})"
    for link in open_files.iterdir():
        try:
            name = str(link.readlink())
        except OSError:  # closed meanwhile, as the one that lists them
            continue
        if name.startswith("/dev/nvidia-uvm"):
            return f"{name} is open, as after the CUDA driver was initialised"
    return ""
