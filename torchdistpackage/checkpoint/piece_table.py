"""A table of the pieces of tensors in each file of a checkpoint, told by the ranks that wrote them.

Every rank sends the compressed header of its file to the rank that commits. With later saves it
sends only a digest, as shapes rarely change. So no rank must read the headers of all files.
"""

import hashlib
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from torchdistpackage.checkpoint.manifest import FileFacts, Manifest, TensorEntry
from torchdistpackage.errors import CheckpointError

Files = Mapping[str, FileFacts]
"""The written files by name."""


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The files that one rank has written.

    digests: the digest of each file's header, by the file's name. headers: by digest, the
    compressed headers that the committer lacks.
    """

    files: Files
    digests: Mapping[str, str]
    headers: Mapping[str, bytes]


class PieceTable:
    """The headers of a group's last save, on the rank that commits and on the one that wrote."""

    def __init__(self) -> None:
        self._sent: set[str] = set()
        self._headers: dict[str, bytes] = {}
        self._digests: dict[str, str] = {}
        self._collected: tuple[Mapping[str, str], dict[str, TensorEntry]] = ({}, {})

    # -- on each rank ----------------------------------------------------------------------

    def describe(self, temporary: Path, files: Files) -> WrittenFiles:
        """Read the headers of files that this rank has just written."""
        digests: dict[str, str] = {}
        headers: dict[str, bytes] = {}
        for name in files:
            with safe_open(temporary / name, framework="pt") as shard:
                text = shard.metadata()["pieces"].encode()
            digests[name] = digest = hashlib.sha256(text).hexdigest()[:32]
            if digest not in self._sent:
                headers[digest] = zlib.compress(text, 1)
        return WrittenFiles(files, digests, headers)

    def arrived(self, written: WrittenFiles) -> None:
        """Note that the committer now has the headers of `written`, and no older ones."""
        self._sent = {*written.digests.values()}

    # -- on the rank that commits ------------------------------------------------------------

    def take(self, written: Iterable[WrittenFiles]) -> None:
        """Keep the headers of this save; the ranks send only those that are new."""
        headers = dict(self._headers)
        self._digests = {}
        for each in written:
            headers |= each.headers
            self._digests |= each.digests
        self._headers = {digest: headers[digest] for digest in self._digests.values()}

    def tensors(self, files: Files) -> dict[str, TensorEntry]:
        """Return all tensors of a checkpoint with these files.

        Raises:
            CheckpointError: ranks disagree about a tensor, or its pieces do not tile it.
        """
        digests = {name: self._digests[name] for name in files}
        if digests != self._collected[0]:
            headers = self._headers
            texts = {n: zlib.decompress(headers[digest]).decode() for n, digest in digests.items()}
            self._collected = digests, collect(texts)
        return dict(self._collected[1])


def collect(headers: Mapping[str, str]) -> dict[str, TensorEntry]:
    """Return all tensors of a checkpoint, from the headers of its files by name.

    Raises:
        CheckpointError: ranks disagree about a tensor, or its pieces do not tile it.
    """
    tensors: dict[str, TensorEntry] = {}
    pieces: dict[str, list[TensorEntry]] = {}
    for file, text in headers.items():
        for name, entry in Manifest.from_json(text).tensors.items():
            have = tensors.setdefault(name, entry)
            if (have.shape, have.dtype) != (entry.shape, entry.dtype):
                raise CheckpointError(
                    f"{name} is {entry.dtype} of shape {entry.shape} in {file}, but {have.dtype} "
                    f"of shape {have.shape} in {have.pieces[0].file}; give it one layout"
                )
            pieces.setdefault(name, []).append(entry)
    for name, entries in pieces.items():
        entry = tensors[name]
        tensors[name] = TensorEntry(
            entry.shape, entry.dtype, tuple(piece for each in entries for piece in each.pieces)
        )
        covered = sum(math.prod(piece.lengths) for piece in tensors[name].pieces)
        if covered != math.prod(entry.shape):
            raise CheckpointError(
                f"{name}: the ranks own {covered} elements of {math.prod(entry.shape)} "
                f"(shape {entry.shape}); give it the same layout on all ranks"
            )
    return tensors
