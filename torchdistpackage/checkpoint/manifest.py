"""What a checkpoint holds, as one JSON file in global coordinates.

One rule: nothing here speaks of ranks or local tensors. Each tensor has its global shape and a
list of boxes that tile it, each with the file it is in, so a reader needs to know its own
layout and not the writer's. A file that is not listed is no part of the checkpoint, and one that
is listed has the size and checksum given here.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchdistpackage.errors import CheckpointError

FORMAT = 1
NAME = "manifest.json"

Fact = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor: `key` in `file` holds [offset, offset + lengths) of the global one."""

    file: str
    key: str
    offset: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: global shape, dtype (`float32`) and the pieces that tile it."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]

    def find(self, offset: tuple[int, ...], lengths: tuple[int, ...]) -> Piece | None:
        """The piece that is exactly this box."""
        box = (offset, lengths)
        return next((p for p in self.pieces if (p.offset, p.lengths) == box), None)


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
    tensors: Mapping[str, Entry]
    files: Mapping[str, FileFacts]
    facts: Mapping[str, Fact] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> str:
        """JSON text with a checksum over itself: a flipped digit would still parse."""
        body = asdict(self)
        return json.dumps({"crc32": _checksum(body), "manifest": body})

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Inverse of `to_json`.

        Raises:
            CheckpointError: not JSON, altered, of another format, or with something missing.
        """
        try:
            whole: dict[str, Any] = json.loads(text)
            data: dict[str, Any] = whole["manifest"]
            if data["format"] != FORMAT:
                raise CheckpointError(
                    f"it is of format {data['format']}, this version reads {FORMAT}"
                )
            if _checksum(data) != whole["crc32"]:
                raise CheckpointError(
                    f"its checksum is {_checksum(data)}, and it says {whole['crc32']}"
                )
            return cls(
                step=int(data["step"]),
                tokens=int(data["tokens"]),
                degrees=tuple((str(axis), int(size)) for axis, size in data["degrees"]),
                tensors={name: _entry(entry) for name, entry in data["tensors"].items()},
                files={name: FileFacts(**facts) for name, facts in data["files"].items()},
                facts=data["facts"],
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"it is no manifest: {error!r}") from error


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    path = folder / NAME
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder} has no {NAME}, so it is no complete checkpoint; name one that has"
        ) from error
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        raise CheckpointError(
            f"{path} does not parse: {error}; use another checkpoint, or the version that wrote it"
        ) from error


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body).encode())


def _entry(data: dict[str, Any]) -> Entry:
    pieces = tuple(
        Piece(p["file"], p["key"], tuple(p["offset"]), tuple(p["lengths"])) for p in data["pieces"]
    )
    return Entry(tuple(data["shape"]), data["dtype"], pieces)
