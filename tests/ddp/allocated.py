"""Bytes that a piece of work holds at its worst, and what it leaves: counted, not estimated.

(Not with the profiler: it crashes when a message of gloo ends while it stops.)
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class Meter(TorchDispatchMode):
    """Watches every operation of `run`, those of autograd and optimizers too.

    now: bytes of the storages made under `run` that are still alive. peak: the most there were
    after any operation of the last `run`. Storages made elsewhere do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, int] = {}  # address of a storage -> weak pointer to it

    def run(self, work: Callable[..., T], *args: object, **options: object) -> T:
        """`work(*args, **options)`."""
        self.peak = self.now
        with self:
            result = work(*args, **options)
        self.peak = max(self.peak, self.now)
        return result

    @property
    def now(self) -> int:
        total = 0
        for address, pointer in list(self._made.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(pointer)
            if storage is None:
                torch.UntypedStorage._free_weak_ref(self._made.pop(address))
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for x in _tensors(result):
            storage = x.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self._made:
                self._made[storage._cdata] = storage._weak_ref()
        self.peak = max(self.peak, self.now)
        return result


def _tensors(values: object) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
