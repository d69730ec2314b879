"""Signals that ask a run to end: noted by the handler, acted on elsewhere; and those that stop it.

One rule: the handler does nothing but note. What runs the process looks at the note where it can
act on it, and every process that shares a step must agree first.
"""

import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torchdistpackage.errors import LaunchError

STOPPED = ("T", "t")
"""States in /proc of a process that is stopped, by a signal and by a debugger."""


class SignalFlag:
    """Signals received since `listen`, in order. A fork takes the handlers with it."""

    def __init__(self) -> None:
        self.all_received: list[signal.Signals] = []

    def listen(self, names: Sequence[str]) -> None:
        """Note the signals `names` ("USR1", "TERM", ...) from now on, in the main thread.

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
        """Name of the first one; "" if there was none."""
        return self.all_received[0].name if self.all_received else ""

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.all_received.append(signal.Signals(signum))


def stopped(pid: int) -> str:
    """The letter of its state as in /proc, T or t (by a debugger); "" if it is not stopped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return ""
    letter = stat.rpartition(")")[2].split()[0]
    return letter if letter in STOPPED else ""
