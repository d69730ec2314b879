"""A call in flight, and the handle that its issuer waits for."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from torchdistpackage.errors import RaceError
from torchdistpackage.harness.late.guard import Guard
from torchdistpackage.harness.late.transfer import Transfer
from torchdistpackage.harness.lint.own_backend import HERE, OwnWork

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_NUM_FRAMES = 6


own_operations = torch._C._DisableTorchDispatch
"""Inside, no mode sees what this transport does itself."""


class LateCall:
    """One call from its issue to its delivery.

    name: operation, number and ranks. finish: writes the results, from what the transfer brought.
    """

    def __init__(
        self,
        name: str,
        guards: Sequence[Guard],
        transfer: Transfer,
        finish: Callable[[Transfer, list[Tensor]], None],
    ):
        self.name, self.guards, self.transfer, self._finish = name, guards, transfer, finish
        self.where = issued_at()
        self.done = self.waited = False
        self.handle: Callable[[], object] = lambda: None
        for guard in guards:  # all of them first, for one may be part of another
            guard.hold()
        for guard in guards:
            guard.poison()

    def deliver(self) -> None:
        """Wait for the data, look at what happened to the tensors meanwhile, write the results.

        Raises:
            RaceError: something did.
        """
        self.transfer.wait()
        self.done = True
        with own_operations():
            self._finish_unless_touched()

    def _finish_unless_touched(self) -> None:
        for guard in self.guards:
            self._refuse(guard, guard.lift())
        for guard in self.guards:
            if not guard.written:
                self._refuse(guard, guard.compare())
        self._finish(self.transfer, [guard.x for guard in self.guards if guard.written])
        self.guards, self.transfer = (), Transfer(())

    @property
    def is_lost(self) -> bool:
        """Whether nobody can wait any more, but somebody still has the memory that it writes."""
        if self.done or self.waited or self.handle() is not None:
            return False
        memory = Counter(guard.pointer for guard in self.guards)
        return any(g.written and g.is_shared(memory[g.pointer]) for g in self.guards)

    def _refuse(self, guard: Guard, found: str) -> None:
        if found:
            raise RaceError(f"{self.name}, tensor of shape {guard.shape}: {found}{self.where}")


class LateWork(OwnWork):
    """Handle of a call. settle: brings the call about. call: None if that is done."""

    def __init__(self, call: LateCall | None, settle: Callable[[], None], result: list[Tensor]):
        super().__init__(result)
        if call is not None:
            call.handle = weakref.ref(self)
        self.call, self._settle, self._asked = call, settle, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout:
            name = "a call" if self.call is None else self.call.name
            raise RaceError(
                f"{name}: wait(timeout={timeout}) blocks the host on NCCL until the device is "
                f"done; call wait() and leave the limit to the group{issued_at()}"
            )
        if self.call is not None:
            self.call.waited = True
            self._settle()
        return True

    def is_completed(self) -> bool:
        """As a device is asked: not yet at first, then as soon as the peers have come."""
        call = self.call
        if call is None or call.done:
            return True
        if not self._asked:
            self._asked = True
        elif call.transfer.is_ready(0.0):
            self.wait()
        return call.done

    def is_success(self) -> bool:
        return self.call is None or self.call.done

    def result(self) -> list[Tensor]:
        return self._result


def issued_at() -> str:
    """The innermost lines of the program that led here, for a message."""
    frame, lines = sys._getframe(1), []
    while frame is not None and len(lines) < _NUM_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith((_HERE, HERE, _TORCH)):
            lines.append(f"\n  at {code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return "".join(lines)
