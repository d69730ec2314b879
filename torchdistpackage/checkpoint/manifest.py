"""What a checkpoint holds, as one JSON file in global coordinates.

One rule: nothing here speaks of ranks or local tensors. Each tensor has its global shape and a
list of boxes that tile it, each with the file it is in, so a reader needs to know its own
layout and not the writer's. A file that is not listed is no part of the checkpoint, and one that
is listed has the size and checksum given here.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchdistpackage.bounded import parse_json
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.flat_slices import Box, overlap, shifted

FORMAT = 1
NAME = "manifest.json"
MAX_BYTES = 1 << 28
"""Of the file; that of a run on ten thousand ranks has about half."""

Fact = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A box of a tensor: `key` in `file` holds [offset, offset + lengths) of the global one."""

    file: str
    key: str
    offset: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def box(self) -> Box:
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.lengths, strict=True))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: global shape, dtype (`float32`) and the pieces that tile it."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[TensorChunk, ...]

    def covering(self, box: Box) -> Iterator[tuple[TensorChunk, Box, Box]]:
        """(piece, what of it is in `box`, in its own coordinates, and where that lies in `box`).

        Pieces that were checked to tile the tensor cover every box in it exactly once.
        """
        for piece in self.pieces:
            common = overlap(piece.box, box)
            if common is not None:
                of_piece = tuple(shifted(c, -o) for c, o in zip(common, piece.offset, strict=True))
                of_box = tuple(shifted(c, -b.start) for c, b in zip(common, box, strict=True))
                yield piece, of_piece, of_box


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a file must be, to the byte."""

    size_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint.

    degrees: (axis, size) of the run that wrote it, outermost first, for messages and extras.
    facts: what else the writer says of its run (seed, name, ...), plain values.
    """

    step: int
    tokens: int
    degrees: tuple[tuple[str, int], ...]
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileFacts]
    facts: Mapping[str, Fact] = field(default_factory=dict[str, Fact])
    format: int = FORMAT

    def to_json(self) -> str:
        """JSON text with a checksum over itself: a flipped digit would still parse."""
        body = asdict(self)
        return json.dumps({"crc32": _checksum(body), "manifest": body})

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Inverse of `to_json`.

        Raises:
            CheckpointError: not JSON, altered, of another format, or with something missing or of
                another type. Whether it can be true is not looked at (validate.py).
        """
        try:
            whole: dict[str, Any] = parse_json(text)
            data: dict[str, Any] = whole["manifest"]
            if data["format"] != FORMAT:
                raise CheckpointError(
                    f"it is of format {str(data['format'])[:40]}, this version reads {FORMAT}"
                )
            if _checksum(data) != whole["crc32"]:
                raise CheckpointError(
                    f"its checksum is {_checksum(data)}, and it says {str(whole['crc32'])[:40]}"
                )
            return cls(
                step=_count(data["step"]),
                tokens=_count(data["tokens"]),
                degrees=tuple((_text(axis), _count(size)) for axis, size in data["degrees"]),
                tensors={name: _entry(entry) for name, entry in data["tensors"].items()},
                files={
                    name: FileFacts(_count(x["size_bytes"]), _count(x["crc32"]))
                    for name, x in data["files"].items()
                },
                facts={name: _fact(x) for name, x in data["facts"].items()},
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"it is no manifest: {error!r}") from error


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body).encode())


def _entry(data: dict[str, Any]) -> TensorEntry:
    pieces = tuple(
        TensorChunk(_text(p["file"]), _text(p["key"]), _counts(p["offset"]), _counts(p["lengths"]))
        for p in data["pieces"]
    )
    return TensorEntry(_counts(data["shape"]), _text(data["dtype"]), pieces)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]} is where a text belongs")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError(f"{str(value)[:40]} is where a number of things belongs")
    return value


def _counts(values: list[object]) -> tuple[int, ...]:
    return tuple(map(_count, values))


def _fact(value: object) -> Fact:
    if not isinstance(value, Fact):
        raise TypeError(f"{str(value)[:40]} is where a plain value belongs")
    return value
