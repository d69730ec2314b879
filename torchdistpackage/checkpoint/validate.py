"""Whether a checkpoint can be what its manifest says, before a tensor is read from it. No torch.

One rule: nobody is believed. Names are plain names in the folder, files are regular and have their
size, pieces tile their tensors once, and the header of a file agrees with both.
"""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchdistpackage.bounded import check_regular, parse_json, read_regular
from torchdistpackage.checkpoint.manifest import (
    MAX_BYTES,
    NAME,
    FileFacts,
    Manifest,
    TensorChunk,
    TensorEntry,
)
from torchdistpackage.errors import CheckpointError

_FOLDER = re.compile(r"step_(\d{6,})(?:\.|\Z)", re.ASCII)
_MAX_NAME_BYTES = 255
_MAX_HEADER_BYTES = 100_000_000
"""As many as safetensors reads."""
_DTYPES = {
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
_NUM_BYTES = dict(_DTYPES.values())

Claim = tuple[str, str, tuple[int, ...]]
"""(key in a file, torch's dtype, shape) of a piece."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder, checked.

    Raises:
        CheckpointError: there is none, or it cannot be true.
    """
    path = folder / NAME
    try:
        manifest = Manifest.from_json(read_regular(path, MAX_BYTES, follow=False).decode())
        check_manifest(manifest, folder)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no {NAME}, so it is no complete checkpoint; name one that has"
        ) from error
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{path} does not parse: {why}; use another checkpoint, or the version that wrote it"
        ) from error
    return manifest


def check_manifest(manifest: Manifest, folder: Path) -> None:
    """Whether a manifest that was read from `folder` may be true.

    Raises:
        CheckpointError: it cannot; says what of it.
    """
    named = _FOLDER.match(folder.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(f"it is of step {manifest.step}, and its folder of {folder.name}")
    for name in manifest.files:
        if not _is_plain(name):
            raise CheckpointError(f"{name[:80]!r} is no plain name of a file in its folder")
    for name, entry in manifest.tensors.items():
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{name[:80]!r} has the type {entry.dtype[:40]!r}")
        for piece in entry.pieces:
            if piece.file not in manifest.files:
                raise CheckpointError(f"{name[:80]!r} is in {piece.file[:80]!r}, which it lacks")
        _check_tiles(name, entry)


def claims(manifest: Manifest) -> dict[str, list[Claim]]:
    """By file what pieces it must hold."""
    found: dict[str, list[Claim]] = {name: [] for name in manifest.files}
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            found[piece.file].append((piece.key, entry.dtype, piece.lengths))
    return found


def check_size(path: Path, expected: FileFacts) -> None:
    """Whether a file is a regular one of the size that it must have; it is not opened.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is something else.
    """
    try:
        size_bytes = check_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path.name} {error.strerror}") from error
    if size_bytes != expected.size_bytes:
        raise CheckpointError(
            f"{path.name} has {size_bytes} bytes, the manifest says {expected.size_bytes}"
        )


def check_header(path: Path, claimed: Iterable[Claim]) -> None:
    """Whether a file of safetensors, a regular one, holds these pieces and nothing out of bounds.

    Raises:
        CheckpointError: it does not.
    """
    size_bytes = check_regular(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size_bytes - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path.name} says its header has {length} bytes")
        raw = file.read(length)
    try:
        header = parse_json(raw.decode())
        held = {k: _Tensor(**v) for k, v in header.items() if k != "__metadata__"}
        end = 0
        for tensor in sorted(held.values(), key=lambda x: x.span):
            if tensor.span != (end, end + tensor.num_bytes):
                raise ValueError(f"a tensor lies at {tensor.span}, the one before ends at {end}")
            end = tensor.span[1]
        if end != size_bytes - 8 - length:
            raise ValueError(f"its tensors end at {end} of {size_bytes - 8 - length} bytes")
        for key, dtype, shape in claimed:
            if (held[key].dtype, held[key].shape) != (_DTYPES[dtype][0], shape):
                raise ValueError(f"{key[:80]!r} is no {dtype} of shape {shape}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path.name} has a header that is not true: {error!r}") from error


class _Tensor:
    """A tensor as the header of a file has it."""

    def __init__(self, dtype: str, shape: list[int], data_offsets: list[int]) -> None:
        first, last = data_offsets
        if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
            raise ValueError("numbers are whole, and 0 or more")
        self.dtype, self.shape, self.span = dtype, tuple(shape), (first, last)
        self.num_bytes = math.prod(shape) * _NUM_BYTES[dtype]


def _is_plain(name: str) -> bool:
    """A name of a file and no way to another: it is joined to the folder's."""
    try:
        fits = 0 < len(name.encode()) <= _MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False
    return fits and name.isprintable() and "/" not in name and not name.startswith(".")


def _check_tiles(name: str, entry: TensorEntry) -> None:
    covered = 0
    for piece in entry.pieces:
        dims = zip(piece.offset, piece.lengths, entry.shape, strict=False)
        same = len(piece.offset) == len(piece.lengths) == len(entry.shape)
        if not same or any(first + number > size for first, number, size in dims):
            raise CheckpointError(
                f"a piece of {name[:80]!r} at {piece.offset} of {piece.lengths} lies outside its "
                f"shape {entry.shape}"
            )
        covered += math.prod(piece.lengths)
    if covered != math.prod(entry.shape):
        raise CheckpointError(
            f"pieces have {covered} of the {math.prod(entry.shape)} elements of {name[:80]!r}"
        )
    for one, other in _overlaps(entry.pieces):
        raise CheckpointError(
            f"pieces of {name[:80]!r} at {one.offset} and {other.offset} overlap, so it has a hole"
        )


def _overlaps(pieces: Iterable[TensorChunk]) -> Iterator[tuple[TensorChunk, TensorChunk]]:
    """Pairs that share elements. Along the first dim only neighbours are compared."""
    active: list[TensorChunk] = []
    for piece in sorted((p for p in pieces if math.prod(p.lengths)), key=lambda p: p.offset):
        if not piece.offset:
            yield from ((other, piece) for other in active)
        active = [p for p in active if p.offset and _end(p) > piece.offset[0]]
        for other in active:
            dims = zip(other.offset, other.lengths, piece.offset, piece.lengths, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in dims):
                yield other, piece
        active.append(piece)


def _end(piece: TensorChunk) -> int:
    return piece.offset[0] + piece.lengths[0]
