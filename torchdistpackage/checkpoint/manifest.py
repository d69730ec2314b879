"""The manifest of a checkpoint: one JSON file in global coordinates, and the checks of it.

A manifest names no ranks and no local tensors. It gives each tensor's global shape and a list of
boxes that tile it, each with its file, so a reader needs to know only its own layout.

A reader checks everything before it reads a tensor: names are plain file names in the folder, files
are regular and have the right size, pieces tile each tensor exactly once, and file headers agree.
No torch.
"""

import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from torchdistpackage.bounded import (
    DTYPES,
    check_regular,
    opened_size,
    parse_json,
    read_header,
    read_regular,
)
from torchdistpackage.checkpoint.checksums import Checksum, Crc32, add_file, new_checksum
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.derive import Box, overlap, shifted

FORMAT = 2
"""Version of the manifests that we write. Format 1, with CRC-32 checksums, is still read."""
NAME = "manifest.json"
MAX_BYTES = 1 << 28
"""Largest manifest that is accepted, twice the size that ten thousand ranks need."""

_FOLDER = re.compile(r"step_(\d{6,})(?:\.|\Z)", re.ASCII)
_MAX_NAME_BYTES = 255
_SHOWN = 6
"""Largest number of parameters named if a checkpoint belongs to another model."""

Claim = tuple[str, str, tuple[int, ...]]
"""(key in a file, torch's dtype, shape) that the manifest claims for a piece."""

Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Text = Annotated[str, Field(strict=True)]
Counts = tuple[Count, ...]
Fact = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A box of a tensor: `key` in `file` holds [offset, offset + lengths) of the global tensor."""

    file: Text
    key: Text
    offset: Counts
    lengths: Counts

    @property
    def box(self) -> Box:
        """The box as slices of the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.lengths, strict=True))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: global shape, dtype (`float32`) and the pieces that tile it."""

    shape: Counts
    dtype: Text
    pieces: tuple[TensorChunk, ...]

    def covering(self, box: Box) -> Iterator[tuple[TensorChunk, Box, Box]]:
        """Yield (piece, overlap in the piece's coordinates, overlap in the coordinates of
        `box`).
        """
        for piece in self.pieces:
            common = overlap(piece.box, box)
            if common is not None:
                of_piece = tuple(shifted(c, -o) for c, o in zip(common, piece.offset, strict=True))
                of_box = tuple(shifted(c, -b.start) for c, b in zip(common, box, strict=True))
                yield piece, of_piece, of_box


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size and checksum of a file: `xxh3` in hexadecimal or, in format 1, `crc32`."""

    size_bytes: Count
    xxh3: Text | None = None
    crc32: Count | None = None

    def mismatch(self, path: Path) -> str | None:
        """Read a file to its end; return how its checksum differs, or None.

        Raises:
            OSError: the file cannot be read.
        """
        checksum = new_checksum() if self.crc32 is None else Crc32()
        add_file(checksum, path)
        return self.differs(checksum)

    def differs(self, checksum: Checksum) -> str | None:
        """Return how a checksum differs from the manifest's, or None."""
        expected = self.xxh3 if self.crc32 is None else f"{self.crc32:08x}"
        actual = checksum.hexdigest()
        if actual == expected:
            return None
        return f"has checksum {actual}, the manifest says {expected}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of one checkpoint.

    degrees: (axis, size) of the run that wrote it, outermost first, for messages and extras.
    facts: other plain values that the writer records about its run (seed, name, ...).
    """

    step: Count
    tokens: Count
    degrees: tuple[tuple[Text, Count], ...]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileFacts]
    facts: Mapping[str, Fact] = field(default_factory=dict[str, Fact])
    format: int = FORMAT

    def differences(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """Return how its parameters differ from a model's names and shapes; "" if they agree."""
        has = {name: entry.shape for name, entry in self.tensors.items() if "#" not in name}
        problems = [f"{name} is missing" for name in shapes if name not in has]
        problems += [f"{name} is not expected" for name in has if name not in shapes]
        problems += [
            f"{name} has shape {has[name]}, where the model has {shape}"
            for name, shape in shapes.items()
            if name in has and has[name] != shape
        ]
        more = [f"{len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        return "; ".join([*problems[:_SHOWN], *more])

    def to_json(self) -> str:
        """Return JSON text with a checksum over itself, because a flipped digit would still
        parse.
        """
        body = asdict(self)
        return json.dumps({"crc32": _checksum(body), "manifest": body})

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Parse the text of `to_json`; `check_manifest` then checks that the content is consistent.

        Raises:
            CheckpointError: the text is not JSON, was altered, has another format, or has missing
                or mistyped fields.
        """
        try:
            document: dict[str, Any] = parse_json(text)
            data: dict[str, Any] = document["manifest"]
            if data["format"] not in (1, FORMAT):
                raise CheckpointError(
                    f"it has format {str(data['format'])[:40]}; this version reads 1 to {FORMAT}"
                )
            if _checksum(data) != document["crc32"]:
                raise CheckpointError(
                    f"its checksum is {_checksum(data)}, but it states "
                    f"{str(document['crc32'])[:40]}"
                )
            if missing := {x.name for x in fields(cls)} - data.keys():
                raise CheckpointError(f"it lacks {', '.join(sorted(missing))}")
            return _MANIFEST.validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            why = f"{where[:80]}: {first['msg']}, got {str(first['input'])[:40]}"
            raise CheckpointError(f"it is not a manifest: {why}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"it is not a manifest: {error!r}") from error


_MANIFEST = TypeAdapter(Manifest)


def _checksum(body: dict[str, Any]) -> int:
    """Return the checksum of a manifest's body."""
    return zlib.crc32(json.dumps(body).encode())


# -- consistency -----------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint folder.

    Raises:
        CheckpointError: the manifest is missing, invalid or inconsistent.
    """
    path = folder / NAME
    try:
        manifest = Manifest.from_json(read_regular(path, MAX_BYTES, follow=False).decode())
        check_manifest(manifest, folder)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no {NAME}, so it is not a complete checkpoint; name one that has it"
        ) from error
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(
            f"{path} does not parse: {why}; use another checkpoint, or the version that wrote it"
        ) from error
    return manifest


def check_manifest(manifest: Manifest, folder: Path) -> None:
    """Raise CheckpointError if a manifest that was read from `folder` is inconsistent."""
    named = _FOLDER.match(folder.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(f"it has step {manifest.step}, but its folder is {folder.name}")
    for name, facts in manifest.files.items():
        if not _is_plain(name):
            raise CheckpointError(f"{name[:80]!r} is not a plain name of a file in its folder")
        checksums = [key for key in ("crc32", "xxh3") if getattr(facts, key) is not None]
        if checksums != [needed := "crc32" if manifest.format == 1 else "xxh3"]:
            has = " and ".join(checksums) or "no checksum"
            raise CheckpointError(
                f"{name[:80]!r} has {has}, where format {manifest.format} has {needed}"
            )
    for name, entry in manifest.tensors.items():
        if entry.dtype not in DTYPES:
            raise CheckpointError(f"{name[:80]!r} has the type {entry.dtype[:40]!r}")
        for piece in entry.pieces:
            if piece.file not in manifest.files:
                raise CheckpointError(f"{name[:80]!r} is in {piece.file[:80]!r}, which it lacks")
        _check_tiles(name, entry)


def claims(manifest: Manifest) -> dict[str, list[Claim]]:
    """Return, for each file, the pieces that it must hold."""
    by_file: dict[str, list[Claim]] = {name: [] for name in manifest.files}
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            by_file[piece.file].append((piece.key, entry.dtype, piece.lengths))
    return by_file


def check_size(path: Path, expected: FileFacts) -> None:
    """Check that a file is regular and has the expected size.

    It is opened only if its size seems wrong: a network file system then asks its server again,
    where the node may remember the size of a file that another node was still writing.

    Raises:
        FileNotFoundError: the file is missing.
        CheckpointError: it is not a regular file, or has another size.
    """
    try:
        size_bytes = check_regular(path)
        if size_bytes != expected.size_bytes:
            size_bytes = opened_size(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path.name} {error.strerror}") from error
    if size_bytes != expected.size_bytes:
        raise CheckpointError(
            f"{path.name} has {size_bytes} bytes, the manifest says {expected.size_bytes}"
        )


def check_header(path: Path, claimed: Iterable[Claim]) -> None:
    """Raise CheckpointError if a safetensors file lacks these pieces, or its header is invalid."""
    try:
        stored = read_header(path)
        for key, dtype, shape in claimed:
            if (stored[key].dtype, stored[key].shape) != (DTYPES[dtype][0], shape):
                raise ValueError(f"{key[:80]!r} is not {dtype} of shape {shape}")
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path.name} has a wrong header: {error}") from error


def _is_plain(name: str) -> bool:
    """Return whether `name` is a plain file name, which cannot lead outside the folder."""
    try:
        fits = 0 < len(name.encode()) <= _MAX_NAME_BYTES
    except UnicodeEncodeError:
        return False
    return fits and name.isprintable() and "/" not in name and not name.startswith(".")


def _check_tiles(name: str, entry: TensorEntry) -> None:
    """Raise CheckpointError if the pieces of a tensor do not tile it exactly once."""
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
    for tile, other in _overlaps(entry.pieces):
        raise CheckpointError(
            f"pieces of {name[:80]!r} at {tile.offset} and {other.offset} overlap, so other "
            "elements are missing"
        )


def _overlaps(pieces: Iterable[TensorChunk]) -> Iterator[tuple[TensorChunk, TensorChunk]]:
    """Yield pairs of pieces that share elements.

    It sweeps along the first dim, so it compares only pieces that overlap there.
    """
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
    """Return where a piece ends along its first dim."""
    return piece.offset[0] + piece.lengths[0]
