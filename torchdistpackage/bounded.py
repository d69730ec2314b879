"""Reading what anybody may have written: files, JSON and headers of safetensors, within bounds.

The bound is checked before anything is opened, read or built, so a device or a pipe costs no more
than its refusal.
"""

import json
import math
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def read_regular(path: Path, most_bytes: int, *, follow: bool = True) -> bytes:
    """The content of a regular file of at most `most_bytes`.

    follow: a symbolic link stands for what it leads to; else it is refused.

    Raises:
        OSError: it cannot be read, or is larger, or no regular file.
        ValueError: the name itself cannot be one.
    """
    _check(path.stat(follow_symlinks=follow), path, most_bytes)
    # It may have been exchanged since: a pipe then does not make the open wait.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    with os.fdopen(os.open(path, flags), "rb") as file:
        _check(os.fstat(file.fileno()), path, most_bytes)
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(None, f"has more than {most_bytes:,} bytes", str(path))
    return content


def check_regular(path: Path, *, follow: bool = False) -> int:
    """The size of a regular file, which is not opened.

    follow: a symbolic link stands for what it leads to; else it is refused.

    Raises:
        OSError: there is none, or it is something else: a link, a device, a pipe, a folder.
    """
    info = path.stat(follow_symlinks=follow)
    _check(info, path, info.st_size)
    return info.st_size


def opened_size(path: Path) -> int:
    """The size of a regular file as an open shows it.

    A node of a network file system may remember the size that a file had while another node wrote
    it; it asks the server again when the file is opened.

    Raises:
        OSError: as `check_regular`, or it cannot be read.
    """
    check_regular(path)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW)
    try:
        info = os.fstat(handle)
        _check(info, path, info.st_size)
    finally:
        os.close(handle)
    return info.st_size


def _check(info: os.stat_result, path: Path, most_bytes: int) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise OSError(None, f"is {_KINDS.get(stat.S_IFMT(info.st_mode), 'no regular file')}", path)
    if info.st_size > most_bytes:
        raise OSError(
            None, f"has {info.st_size:,} bytes, more than the {most_bytes:,} allowed", path
        )


_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


_UNSHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters that are not printed as they are: ones that move a cursor, colour a terminal or
reverse the order of letters, and bytes that are no character."""


def printable(text: str) -> str:
    """Return the text of a user for a terminal or a page: with escapes for what is not seen."""
    return _UNSHOWN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def parse_json(text: str, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The value of JSON text. object_hook: of each mapping, innermost first, what stands for it.

    Raises:
        ValueError: it is none, or nested too deeply to be read.
    """
    try:
        return json.loads(text.removeprefix("\ufeff"), object_hook=object_hook)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


BOM = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8, which some programs put before a text."""


def wrong_encoding(head: bytes) -> str | None:
    """Say which encoding a text file that begins with these bytes, which are not UTF-8, seems to
    have.
    """
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "is UTF-32 text; save it as UTF-8"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16 text; save it as UTF-8"
    if len(head) > 1 and (head[0] == 0) != (head[1] == 0):
        return f"is not text: byte {head.index(0)} is 0, as in UTF-16; save it as UTF-8"
    return None


MAX_HEADER_BYTES = 100_000_000
"""Largest header that is read, the same as safetensors' own limit."""
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
"""torch's name of a dtype -> (safetensors' name, bytes of an element)."""
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
    """Return the tensors of a safetensors file by name, from its header, which is checked against
    the file.

    A file is 8 bytes of length, a header of JSON, and the tensors one after the other.

    Raises:
        OSError: it is not a regular file, or cannot be read.
        ValueError: the header is none, or is not true of the file.
    """
    size_bytes = opened_size(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size_bytes - 8, MAX_HEADER_BYTES):
            raise ValueError(f"its header claims to have {length} bytes")
        raw = file.read(length)
    try:
        header: dict[str, Any] = parse_json(raw.decode())
        tensors = {k: StoredTensor.of(**v) for k, v in header.items() if k != "__metadata__"}
        end = 0
        for tensor in sorted(tensors.values(), key=lambda x: x.span):
            if tensor.span != (end, end + tensor.num_bytes):
                raise ValueError(f"a tensor lies at {tensor.span}, the one before ends at {end}")
            end = tensor.span[1]
        if end != size_bytes - 8 - length:
            raise ValueError(f"its tensors end at {end} of {size_bytes - 8 - length} bytes")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"its header is wrong: {error!r}") from error
    return tensors


_BLOCK_BYTES = 1 << 20


def same_bits(one: tuple[Path, StoredTensor], other: tuple[Path, StoredTensor]) -> bool:
    """Return whether two tensors, each with its safetensors file, have the same type, shape and
    bits.

    They are read block by block, as far as they are equal.

    Raises:
        OSError: a file cannot be read.
    """
    (path, stored), (other_path, other_stored) = one, other
    if (stored.dtype, stored.shape) != (other_stored.dtype, other_stored.shape):
        return False
    with path.open("rb") as file, other_path.open("rb") as other_file:
        for opened, tensor in ((file, stored), (other_file, other_stored)):
            length = int.from_bytes(opened.read(8), "little")
            opened.seek(8 + length + tensor.span[0])
        for start in range(0, stored.num_bytes, _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, stored.num_bytes - start)
            if file.read(size) != other_file.read(size):
                return False
    return True
