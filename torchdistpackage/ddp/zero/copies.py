"""Where a rank keeps its own copies of slices: beside them, or as Offload has it (offload.py).

One rule: whoever keeps copies also moves numbers to and from them, so that nobody else knows where
they are.
"""

from typing import Protocol

import torch
from torch import Tensor


class Copies(Protocol):
    """`host` is memory from `keep`, `device` a slice of a bucket."""

    def keep(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An empty tensor of the shape of `like`."""
        ...

    def to_host(self, host: Tensor, device: Tensor) -> None:
        """Begin to copy; `host` may be read after `wait`, `device` may go at once."""
        ...

    def to_device(self, host: Tensor, device: Tensor) -> None:
        """Copy; what follows on the current stream finds it there."""
        ...

    def wait(self) -> None:
        """Until everything begun by `to_host` is there."""
        ...


class Beside:
    """On the device of the slices."""

    def keep(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(like, dtype=dtype)

    def to_host(self, host: Tensor, device: Tensor) -> None:
        host.copy_(device)

    def to_device(self, host: Tensor, device: Tensor) -> None:
        device.copy_(host)

    def wait(self) -> None:
        """It is in order on the stream."""
