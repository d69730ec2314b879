"""What the header of a safetensors file says, checked against the file. No torch.

A file is 8 bytes of length, a header of JSON, and the tensors one after the other.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchdistpackage.bounded import check_regular, parse_json

MAX_HEADER_BYTES = 100_000_000
"""As many as safetensors reads."""
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex64": ("C64", 8),
}
"""torch's name -> (that of safetensors, bytes of an element)."""
_NUM_BYTES = dict(DTYPES.values())


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of a file has it; dtype: safetensors' name. span: bytes from the end
    of the header."""

    dtype: str
    shape: tuple[int, ...]
    span: tuple[int, int]

    @classmethod
    def of(cls, dtype: str, shape: list[int], data_offsets: list[int]) -> "StoredTensor":
        """One entry of a header.

        Raises:
            ValueError, TypeError: it is none.
        """
        first, last = data_offsets
        if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
            raise ValueError("numbers are whole, and 0 or more")
        return cls(dtype, tuple(shape), (first, last))

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * _NUM_BYTES[self.dtype]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name.

    Raises:
        OSError: it is no regular file, or cannot be read.
        ValueError: the header is none, or is not true of the file.
    """
    size_bytes = check_regular(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size_bytes - 8, MAX_HEADER_BYTES):
            raise ValueError(f"it says its header has {length} bytes")
        raw = file.read(length)
    try:
        header: dict[str, Any] = parse_json(raw.decode())
        held = {k: StoredTensor.of(**v) for k, v in header.items() if k != "__metadata__"}
        end = 0
        for tensor in sorted(held.values(), key=lambda x: x.span):
            if tensor.span != (end, end + tensor.num_bytes):
                raise ValueError(f"a tensor lies at {tensor.span}, the one before ends at {end}")
            end = tensor.span[1]
        if end != size_bytes - 8 - length:
            raise ValueError(f"its tensors end at {end} of {size_bytes - 8 - length} bytes")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"it has a header that is not true: {error!r}") from error
    return held
