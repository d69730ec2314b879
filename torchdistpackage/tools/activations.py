"""What autograd keeps alive for a backward, storage by storage, and for which modules.

One run is the outermost forward. Its saved-tensor hooks are entered once, outside those of the
modules inside, so a module that offloads or checkpoints its activations keeps doing so. A storage
counts once however many tensors share it; parameters and buffers do not count.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchdistpackage.tools.nested import tensors_in


def storages_of(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """The storages of `tensors`; of wrapper subclasses those of the tensors inside."""
    for x in tensors:
        if is_traceable_wrapper_subclass(x):
            names, _ = x.__tensor_flatten__()
            yield from storages_of(getattr(x, name) for name in names)
        elif x.layout is torch.strided:
            yield x.untyped_storage()
        elif x.layout is torch.sparse_coo:
            yield from storages_of((x._indices(), x._values()))


def sizes_of(value: object) -> dict[int, int]:
    """By address the bytes of the storages of all tensors in `value`."""
    found = storages_of(x for _, x in tensors_in(value))
    return {s._cdata: s.nbytes() for s in found}


class SavedStorages:
    """How often each storage was saved while this was open. inputs: bytes by address."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.inputs: dict[int, int] = {}


class SavedTensorRun:
    """Hooks for one outermost forward of `module`. open: all that a saved tensor counts for.

    A tensor changed in place after it was saved is refused in the backward, as without hooks.
    """

    def __init__(self, module: nn.Module):
        self.total = SavedStorages()
        self.open: list[SavedStorages] = [self.total]
        held = (*module.parameters(), *module.buffers())
        self._model = {s._cdata for s in storages_of(held)}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def begin(self) -> None:
        self._hooks.__enter__()

    def end(self) -> None:
        self._hooks.__exit__()
        # what only a dropped part of the graph had saved is gone
        self._alive = {
            key: held
            for key, held in self._alive.items()
            if key not in self._model and not held[0].expired()
        }

    def close(self, module: nn.Module) -> None:
        """The innermost part is over. Weights that are gathered for a forward are weights too."""
        self.open.pop()
        held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        self._model |= {s._cdata for s in storages_of(held)}

    def kept_bytes(self, saved: SavedStorages) -> int:
        """Bytes that `saved` holds at the end of the run."""
        return sum(self._alive[key][1] for key in saved.counts if key in self._alive)

    def freed_bytes(self, saved: SavedStorages) -> int:
        """What is held less if this part is recomputed in the backward, and only its inputs kept.

        Storages that others saved too are not freed; inputs that no other node saved are kept anew.
        """
        freed = 0
        for key, count in saved.counts.items():
            if key in self._alive and key not in saved.inputs and count == self.total.counts[key]:
                freed += self._alive[key][1]
        known = self.total.counts.keys() | self.total.inputs.keys()
        return freed - sum(n for key, n in saved.inputs.items() if key not in known)

    def take_inputs(self, saved: SavedStorages, inputs: object) -> None:
        """Note what goes into a module. What goes into the model itself its caller keeps."""
        sizes = {key: n for key, n in sizes_of(inputs).items() if key not in self._model}
        if len(self.open) == 1:
            self.total.inputs |= sizes
        saved.inputs |= sizes

    def _pack(self, x: Tensor) -> tuple[Tensor, int]:
        for storage in storages_of((x,)):
            key = storage._cdata
            if key in self._model:
                continue
            if key not in self._alive or self._alive[key][0].expired():
                self._alive[key] = StorageWeakRef(storage), storage.nbytes()
            for saved in self.open:
                saved.counts[key] += 1
        # a node would keep its own output, and that the node: a cycle that nothing frees
        return x.detach(), x._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    if x._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)} that the backward needs was modified in place: "
            f"version {x._version}, saved at version {version}"
        )
    return x
