"""Signals that ask a run to end: noted by the handler, acted on elsewhere.

One rule: the handler does nothing but note. Whoever runs the process looks at the note where it can
act on it, and every process that shares a step must agree first.
"""

import signal
from collections.abc import Sequence
from types import FrameType

from torchdistpackage.errors import LaunchError


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
