"""The bytes of all storages that are alive, counted without an allocator.

A dispatch mode sees each tensor that an operation takes or returns, and a weak reference tells when
its storage is freed. So the count works on a CPU and on fake tensors too. It does not see memory
that a kernel allocates for itself.
"""

import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchdistpackage.tools.activations import storages_of

Sizes = dict[int, int]
"""Bytes of storages, by address."""


class LiveBytes(TorchDispatchMode):
    """A count of the bytes of all living storages that an operation has taken or returned.

    peak, at_peak: the most bytes since `reset`, and the storages at that moment.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Sizes = {}
        self.total = self.peak = 0
        self.at_peak: Sizes = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor))
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.sizes)
        return result

    def reset(self) -> None:
        """Forget the peak."""
        self.peak, self.at_peak = 0, {}

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count inside the block; it also sees a storage that is resized in place."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self.sizes:
                self._set(storage._cdata, size)
            return result

        with patch.object(torch.UntypedStorage, "resize_", resized), self:
            yield

    def _note(self, tensors: Iterable[Tensor]) -> None:
        for storage in storages_of(tensors):
            key = storage._cdata
            if key not in self.sizes:
                self.sizes[key] = 0
                weakref.finalize(storage, self._gone, key)
            self._set(key, storage.nbytes())

    def _gone(self, key: int) -> None:
        self.total -= self.sizes.pop(key)

    def _set(self, key: int, num_bytes: int) -> None:
        self.total += num_bytes - self.sizes[key]
        self.sizes[key] = num_bytes
