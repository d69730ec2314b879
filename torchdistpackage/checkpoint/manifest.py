"""What a checkpoint holds, as one JSON file in global coordinates, and whether it can be true.

Nothing here speaks of ranks or local tensors. Each tensor has its global shape and a
list of boxes that tile it, each with its file, so a reader needs to know its own layout only.

Before a tensor is read all of it is checked: names are plain names in the folder, files are
regular and of their size, pieces tile tensors once, and headers agree with both. No torch.
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

from torchdistpackage.bounded import DTYPES, check_regular, parse_json, read_header, read_regular
from torchdistpackage.checkpoint.checksums import Checksum, Crc32, add_file, new_checksum
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.derive import Box, overlap, shifted

FORMAT = 2
"""Of what is written. Format 1, which is read too, has CRC-32 checksums of files."""
NAME = "manifest.json"
MAX_BYTES = 1 << 28
"""Of the file; that of a run on ten thousand ranks has about half."""

_FOLDER = re.compile(r"step_(\d{6,})(?:\.|\Z)", re.ASCII)
_MAX_NAME_BYTES = 255
_SHOWN = 6
"""Parameters named, where a checkpoint is of another model."""

Claim = tuple[str, str, tuple[int, ...]]
"""(key in a file, torch's dtype, shape) of a piece."""

Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Text = Annotated[str, Field(strict=True)]
Counts = tuple[Count, ...]
Fact = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A box of a tensor: `key` in `file` holds [offset, offset + lengths) of the global one."""

    file: Text
    key: Text
    offset: Counts
    lengths: Counts

    @property
    def box(self) -> Box:
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.lengths, strict=True))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: global shape, dtype (`float32`) and the pieces that tile it."""

    shape: Counts
    dtype: Text
    pieces: tuple[TensorChunk, ...]

    def covering(self, box: Box) -> Iterator[tuple[TensorChunk, Box, Box]]:
        """(piece, what of it is in `box`, in its own coordinates, and where that lies in `box`)."""
        for piece in self.pieces:
            common = overlap(piece.box, box)
            if common is not None:
                of_piece = tuple(shifted(c, -o) for c, o in zip(common, piece.offset, strict=True))
                of_box = tuple(shifted(c, -b.start) for c, b in zip(common, box, strict=True))
                yield piece, of_piece, of_box


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a file must be, to the byte: `xxh3` of it in hexadecimal or, in format 1, `crc32`."""

    size_bytes: Count
    xxh3: Text | None = None
    crc32: Count | None = None

    def mismatch(self, path: Path) -> str | None:
        """What is wrong with the bytes of a file, which is read to its end; None: nothing.

        Raises:
            OSError: it cannot be read.
        """
        checksum = new_checksum() if self.crc32 is None else Crc32()
        add_file(checksum, path)
        return self.differs(checksum)

    def differs(self, checksum: Checksum) -> str | None:
        """How the checksum of all bytes is another than the manifest's; None: it is that."""
        expected = self.xxh3 if self.crc32 is None else f"{self.crc32:08x}"
        found = checksum.hexdigest()
        if found == expected:
            return None
        return f"has checksum {found}, the manifest says {expected}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint.

    degrees: (axis, size) of the run that wrote it, outermost first, for messages and extras.
    facts: what else the writer says of its run (seed, name, ...), plain values.
    """

    step: Count
    tokens: Count
    degrees: tuple[tuple[Text, Count], ...]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileFacts]
    facts: Mapping[str, Fact] = field(default_factory=dict[str, Fact])
    format: int = FORMAT

    def differences(self, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """How its parameters differ from those of a model, of these names and shapes; "": not."""
        has = {name: entry.shape for name, entry in self.tensors.items() if "#" not in name}
        found = [f"{name} is missing" for name in shapes if name not in has]
        found += [f"{name} is not expected" for name in has if name not in shapes]
        found += [
            f"{name} has shape {has[name]}, where the model has {shape}"
            for name, shape in shapes.items()
            if name in has and has[name] != shape
        ]
        more = [f"{len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        return "; ".join([*found[:_SHOWN], *more])

    def to_json(self) -> str:
        """JSON text with a checksum over itself: a flipped digit would still parse."""
        body = asdict(self)
        return json.dumps({"crc32": _checksum(body), "manifest": body})

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Inverse of `to_json`.

        Raises:
            CheckpointError: not JSON, altered, of another format, or with something missing or of
                another type. Whether it can be true `read_manifest` checks.
        """
        try:
            document: dict[str, Any] = parse_json(text)
            data: dict[str, Any] = document["manifest"]
            if data["format"] not in (1, FORMAT):
                raise CheckpointError(
                    f"it is of format {str(data['format'])[:40]}, this version reads 1 to {FORMAT}"
                )
            if _checksum(data) != document["crc32"]:
                raise CheckpointError(
                    f"its checksum is {_checksum(data)}, and it says {str(document['crc32'])[:40]}"
                )
            if missing := {x.name for x in fields(cls)} - data.keys():
                raise CheckpointError(f"it lacks {', '.join(sorted(missing))}")
            return _MANIFEST.validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            why = f"{where[:80]}: {first['msg']}, got {str(first['input'])[:40]}"
            raise CheckpointError(f"it is no manifest: {why}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"it is no manifest: {error!r}") from error


_MANIFEST = TypeAdapter(Manifest)


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body).encode())


# -- whether it can be true ------------------------------------------------------------------


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
    """Raises CheckpointError if a manifest that was read from `folder` cannot be true."""
    named = _FOLDER.match(folder.name)
    if named and int(named[1]) != manifest.step:
        raise CheckpointError(f"it is of step {manifest.step}, and its folder of {folder.name}")
    for name, facts in manifest.files.items():
        if not _is_plain(name):
            raise CheckpointError(f"{name[:80]!r} is no plain name of a file in its folder")
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
    """By file what pieces it must hold."""
    found: dict[str, list[Claim]] = {name: [] for name in manifest.files}
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            found[piece.file].append((piece.key, entry.dtype, piece.lengths))
    return found


def check_size(path: Path, expected: FileFacts) -> None:
    """Check, without opening it, that a file is a regular one of its size.

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
    """Raises CheckpointError if a safetensors file has not these pieces, or lies about itself."""
    try:
        held = read_header(path)
        for key, dtype, shape in claimed:
            if (held[key].dtype, held[key].shape) != (DTYPES[dtype][0], shape):
                raise ValueError(f"{key[:80]!r} is no {dtype} of shape {shape}")
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path.name} has a header that is not true: {error}") from error


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
