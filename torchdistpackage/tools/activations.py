"""The memory that autograd keeps for a backward, by storage and by module.

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
    """Yield the storages of `tensors`; for wrapper subclasses those of the tensors inside."""
    for x in tensors:
        if is_traceable_wrapper_subclass(x):
            names, _ = x.__tensor_flatten__()
            yield from storages_of(getattr(x, name) for name in names)
        elif x.layout is torch.strided:
            yield x.untyped_storage()
        elif x.layout is torch.sparse_coo:
            yield from storages_of((x._indices(), x._values()))


def sizes_of(value: object) -> dict[int, int]:
    """Return the bytes of the storages of all tensors in `value`, by address."""
    storages = storages_of(x for _, x in tensors_in(value))
    return {s._cdata: s.nbytes() for s in storages}


class SavedStorages:
    """A count of how often each storage was saved while this was open. inputs: bytes by address."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()
        self.inputs: dict[int, int] = {}


class SavedTensorRun:
    """The saved-tensor hooks of one outermost forward of `module`.

    A tensor changed in place after it was saved is refused in the backward, as without hooks.
    """

    def __init__(self, module: nn.Module):
        self.total = SavedStorages()
        self.open: list[SavedStorages] = [self.total]
        tensors = (*module.parameters(), *module.buffers())
        self._model = {s._cdata for s in storages_of(tensors)}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def begin(self) -> None:
        """Start to observe saved tensors."""
        self._hooks.__enter__()

    def end(self) -> None:
        """Stop to observe saved tensors, and drop those that no graph holds any more."""
        self._hooks.__exit__()
        # storages that only a dropped part of the graph had saved
        self._alive = {
            key: tensors
            for key, tensors in self._alive.items()
            if key not in self._model and not tensors[0].expired()
        }

    def close(self, module: nn.Module) -> None:
        """End the innermost part. Weights that are gathered for a forward count as weights."""
        self.open.pop()
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        self._model |= {s._cdata for s in storages_of(tensors)}

    def kept_bytes(self, saved: SavedStorages) -> int:
        """Return the bytes that `saved` holds at the end of the run."""
        return sum(self._alive[key][1] for key in saved.counts if key in self._alive)

    def freed_bytes(self, saved: SavedStorages) -> int:
        """Return the bytes saved if this part is recomputed in the backward and only its inputs are
        kept.

        Storages that others saved too are not freed; inputs that no other node saved are kept anew.
        """
        freed = 0
        for key, count in saved.counts.items():
            if key in self._alive and key not in saved.inputs and count == self.total.counts[key]:
                freed += self._alive[key][1]
        saved_elsewhere = self.total.counts.keys() | self.total.inputs.keys()
        return freed - sum(n for key, n in saved.inputs.items() if key not in saved_elsewhere)

    def take_inputs(self, saved: SavedStorages, inputs: object) -> None:
        """Record the inputs of a module; the model's own inputs are kept by its caller."""
        sizes = {key: n for key, n in sizes_of(inputs).items() if key not in self._model}
        if len(self.open) == 1:
            self.total.inputs |= sizes
        saved.inputs |= sizes

    def _pack(self, x: Tensor) -> tuple[Tensor, int]:
        """Count a saved tensor, and return it detached with its version."""
        for storage in storages_of((x,)):
            key = storage._cdata
            if key in self._model:
                continue
            if key not in self._alive or self._alive[key][0].expired():
                self._alive[key] = StorageWeakRef(storage), storage.nbytes()
            for saved in self.open:
                saved.counts[key] += 1
        # detached, because a node would keep its own output, which keeps the node: a leak
        return x.detach(), x._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    """Return the saved tensor; refuse it if it was changed in place."""
    x, version = packed
    if x._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(x.shape)} that the backward needs was modified in place: "
            f"version {x._version}, saved at version {version}; use an operation that makes a new "
            f"tensor"
        )
    return x
