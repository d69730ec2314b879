"""Where a rank keeps its own copies of slices: beside them, or as Offload has it (offload.py).

One rule: whoever keeps copies also moves numbers to and from them, so that nobody else knows where
they are.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class MasterStore(Protocol):
    """`host` is memory from `allocate`, `device` a slice of a bucket.

    ahead: buckets whose sums land before one is stepped, so that copies have begun meanwhile.
    """

    ahead: int

    def allocate(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An empty tensor of the shape of `like`."""
        ...

    def offload(self, host: Tensor, device: Tensor) -> None:
        """Begin to copy; `device` may go at once, and be overwritten after `free`."""
        ...

    def to_device(self, host: Tensor, device: Tensor) -> None:
        """Copy; what follows on the current stream finds it there."""
        ...

    def here(self, host: Tensor) -> Tensor:
        """`host` where slices are, to be added to on the current stream."""
        ...

    def free(self, host: Tensor) -> None:
        """What follows on the current stream may overwrite what was copied to `host`."""
        ...

    def wait(self, *hosts: Tensor) -> None:
        """The host waits until it may read and write these, by default all."""
        ...

    def stepping(self) -> AbstractContextManager[object]:
        """Around a step of what is kept here."""
        ...


class OnDevice:
    """On the device of the slices, where all is in order on the current stream."""

    ahead = 0

    def allocate(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(like, dtype=dtype)

    def offload(self, host: Tensor, device: Tensor) -> None:
        if host is not device:
            host.copy_(device)

    def to_device(self, host: Tensor, device: Tensor) -> None:
        device.copy_(host)

    def here(self, host: Tensor) -> Tensor:
        return host

    def free(self, host: Tensor) -> None:
        """It was copied on the same stream."""

    def wait(self, *hosts: Tensor) -> None:
        """The host reads nothing."""

    def stepping(self) -> AbstractContextManager[object]:
        return nullcontext()
