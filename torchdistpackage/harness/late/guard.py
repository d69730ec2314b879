"""What a call does to a tensor while it is in flight: poison, or a copy to compare with.

One rule: the user's version counter never moves by our own writes, so that whoever else writes is
seen. The poison of floats is a signalling NaN: arithmetic returns another bit pattern, also where
it cannot change a NaN's value (`x * 1.0`).
"""

import torch
from torch import Tensor

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
        # tensors of one storage share a counter: it tells of this one only where it is all there is
        alone = x.numel() * x.itemsize == self._nbytes and not x.is_inference()
        self._version = x._version if alone else None

    def is_shared(self, own: int) -> bool:
        """Whether somebody else has the memory, beside `own` tensors of the call."""
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


def _bits(x: Tensor) -> Tensor:
    """The same memory as integers; `.data` has a version counter of its own."""
    data = torch.view_as_real(x.data) if x.is_complex() else x.data
    return data.view(_BITS[data.itemsize])


def _pattern(x: Tensor) -> int:
    dtype = x.dtype.to_real() if x.is_complex() else x.dtype
    return _POISON.get(dtype, _OTHER)
