"""Sources of named tensors that are read one at a time: exports write them, imports read them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from torchdistpackage.checkpoint.manifest import Fact, Manifest, read_manifest
from torchdistpackage.checkpoint.tensor_file import TensorFile

Described = tuple[str, tuple[int, ...]]
"""(torch's dtype, shape) of a tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorSource:
    """Named tensors that can be read one at a time.

    tensors: dtype and shape of each tensor, by name. read: returns a tensor by name.
    step, tokens, facts: as in the manifest of the run's checkpoint.
    """

    tensors: Mapping[str, Described]
    read: Callable[[str], Tensor]
    step: int = 0
    tokens: int = 0
    facts: Mapping[str, Fact] = field(default_factory=dict[str, Fact])

    def only(self, keeps: Callable[[str], bool]) -> "TensorSource":
        """Return the source with only those tensors whose names `keeps` accepts."""
        return replace(self, tensors={n: x for n, x in self.tensors.items() if keeps(n)})


def checkpoint_source(path: Path) -> TensorSource:
    """Return the tensors of one of our checkpoints, from memory-mapped files.

    Raises:
        CheckpointError: the checkpoint is not complete.
    """
    manifest = read_manifest(path)
    tensors = {name: (x.dtype, x.shape) for name, x in manifest.tensors.items()}
    files: dict[str, TensorFile] = {}

    def read(name: str) -> Tensor:
        return whole_tensor(manifest, path, name, files)

    return TensorSource(tensors, read, manifest.step, manifest.tokens, manifest.facts)


def whole_tensor(manifest: Manifest, path: Path, name: str, files: dict[str, TensorFile]) -> Tensor:
    """Return a tensor of a checkpoint, put together from its pieces.

    files: the files mapped so far, by name; it adds those that it maps.
    """
    entry = manifest.tensors[name]
    for piece in entry.pieces:
        if piece.file not in files:
            files[piece.file] = TensorFile(path / piece.file)
    if len(entry.pieces) == 1:
        (piece,) = entry.pieces
        return files[piece.file][piece.key]
    full = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    for piece in entry.pieces:
        full[piece.box] = files[piece.file][piece.key]
    return full
