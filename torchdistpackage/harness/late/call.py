"""A call in flight, what it does to its tensors meanwhile, and the handle its issuer waits for.

What a call writes is poison until it is done, what it reads is kept to compare with. The user's
version counter never moves by our own writes, so that every other write is seen. The poison of
floats is a signalling NaN: arithmetic returns another bit pattern, also where it cannot change a
NaN's value (`x * 1.0`).
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor

from torchdistpackage.errors import RaceError
from torchdistpackage.harness.late.transfer import Transfer
from torchdistpackage.harness.lint.own_backend import HERE, OwnWork, Tensors

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_NUM_FRAMES = 6
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POISON = {
    torch.float16: 0x7DAD,
    torch.bfloat16: 0x7FAD,
    torch.float32: 0x7FADDEAD,
    torch.float64: 0x7FF5DEADDEADDEAD,
    torch.bool: 1,
    torch.uint8: 0xAD,
    torch.int8: 0x5D,
    torch.int16: 0x5EAD,
    torch.int32: 0x3EADDEAD,
    torch.int64: 0x3EADDEAD,
}
_OTHER = 0x7F  # NaN in each of the float8 formats


GIVEN_BACK = "its memory was given back while in flight"
READ = "it was read before wait()"
WRITTEN = "it was written to while in flight"
CHANGED = "its input was changed while in flight"

own_operations = torch._C._DisableTorchDispatch
"""Inside, no mode sees what this transport does itself."""


def span(x: Tensor) -> tuple[int, int]:
    """Addresses of the first byte of `x` and of the first one after it; of nothing if `x` has gaps,
    in which others may be."""
    reach = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) + 1
    if reach != x.numel():
        return 0, 0
    return x.data_ptr(), x.data_ptr() + reach * x.itemsize


class Guard:
    """A tensor that a call in flight reads, or (`written`) writes."""

    __slots__ = ("_before", "_nbytes", "_version", "pointer", "shape", "span", "written", "x")

    def __init__(self, x: Tensor, written: bool):
        # for others to be counted: a tensor of its own that shares memory and version counter
        self.x = x.detach()
        self.written, self.shape, self.span = written, tuple(x.shape), span(x)
        storage = x.untyped_storage()
        self._nbytes, self.pointer = storage.nbytes(), storage.data_ptr()
        # tensors of one storage share a counter: of this one only where it is all of it
        alone = x.numel() * x.itemsize == self._nbytes and not x.is_inference()
        self._version = x._version if alone else None

    def is_shared(self, own: int) -> bool:
        """Whether someone else has the memory, besides `own` tensors of the call."""
        wrapper = 1  # Python's, through which one asks
        storage = self.x.untyped_storage()
        return torch._C._storage_Use_Count(storage._cdata) > own + wrapper

    def hold(self) -> None:
        """Keep what is there."""
        self._before = _bits(self.x).clone()

    def poison(self) -> None:
        """What is written must be neither read nor written before the call is done."""
        if self.written:
            _bits(self.x).fill_(_pattern(self.x))

    def lift(self) -> str:
        """Take the poison away; what was done to the tensor meanwhile, if anything."""
        storage = self.x.untyped_storage()
        if storage.nbytes() < self._nbytes or storage.data_ptr() != self.pointer:
            return GIVEN_BACK
        if self.written:
            bits = _bits(self.x)
            touched = not bool((bits == _pattern(self.x)).all())
            bits.copy_(self._before)
            if touched or self._version not in (None, self.x._version):
                return WRITTEN
        return ""

    def compare(self) -> str:
        """The same for a tensor that is only read, once all poison is gone."""
        same = self._version in (None, self.x._version)
        if same and torch.equal(_bits(self.x), self._before):
            return ""
        return CHANGED


class LateCall:
    """One call from its issue to its delivery. finish: writes what the transfer brought."""

    def __init__(
        self,
        name: str,
        guards: Sequence[Guard],
        transfer: Transfer,
        finish: Callable[[Transfer, Tensors], None],
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
        """Wait for the data and write the results; RaceError if the tensors were touched."""
        self.transfer.wait()
        self.done = True
        with own_operations():
            for guard in self.guards:
                self._refuse(guard, guard.lift())
            for guard in self.guards:
                if not guard.written:
                    self._refuse(guard, guard.compare())
            self._finish(self.transfer, [guard.x for guard in self.guards if guard.written])
            self.guards, self.transfer = (), Transfer(())

    @property
    def is_lost(self) -> bool:
        """Whether no one can wait any more, but someone still has the memory that it writes."""
        if self.done or self.waited or self.handle() is not None:
            return False
        memory = Counter(guard.pointer for guard in self.guards)
        return any(g.written and g.is_shared(memory[g.pointer]) for g in self.guards)

    def _refuse(self, guard: Guard, found: str) -> None:
        if found:
            raise RaceError(f"{self.name}, tensor of shape {guard.shape}: {found}{self.where}")


class LateWork(OwnWork):
    """Handle of a call. settle: brings the call about. call: None if that is done."""

    def __init__(self, call: LateCall | None, settle: Callable[[], None], result: Tensors):
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


def _bits(x: Tensor) -> Tensor:
    """The same memory as integers; `.data` has a version counter of its own."""
    data = torch.view_as_real(x.data) if x.is_complex() else x.data
    return data.view(_BITS[data.itemsize])


def _pattern(x: Tensor) -> int:
    dtype = x.dtype.to_real() if x.is_complex() else x.dtype
    return _POISON.get(dtype, _OTHER)
