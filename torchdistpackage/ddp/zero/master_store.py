"""Where a rank keeps its copies of slices, and the streams of a device.

Masters, sums of gradients and what the optimizer steps are such copies: here on the slices' own
device; offload.py has another store.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

Stream = Any  # torch.cuda's, or a test's double of it


class MasterStore:
    """Copies of slices on their own device, in order on the current stream.

    `host` is memory from `allocate`, `device` a slice of a bucket. ahead: buckets whose sums land
    before one is stepped, so that copies have begun meanwhile.
    """

    ahead = 0

    def allocate(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An empty tensor of the shape of `like`."""
        return torch.empty_like(like, dtype=dtype)

    def offload(self, host: Tensor, device: Tensor) -> None:
        """Begin to copy; `device` may go at once, and be overwritten after `free(host)`."""
        if host is not device:
            host.copy_(device)

    def to_device(self, host: Tensor, device: Tensor) -> None:
        """Copy and cast on the current stream; `host` must stay as it is until `wait(host)`."""
        device.copy_(host)

    def here(self, host: Tensor) -> Tensor:
        """`host`, or a copy of it, where slices are, to be added to on the current stream."""
        return host

    def free(self, host: Tensor) -> None:
        """What follows on the current stream may overwrite what was copied to `host`."""

    def wait(self, *hosts: Tensor) -> None:
        """The host waits until it may read and write these, by default all; the device goes on."""

    def stepping(self) -> AbstractContextManager[object]:
        """Around a step of what is kept here."""
        return nullcontext()


class CudaStreams:
    """The streams of one device."""

    def __init__(self, device: torch.device):
        self._device = device

    def current(self) -> Stream:
        """The one that computes, as the caller's thread has it."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Inside, it is the current one."""
        return torch.cuda.stream(stream)

    def keep(self, x: Tensor) -> None:
        """The memory of `x` is not given away before the current stream is done with it."""
        x.record_stream(self.current())


def streams_of(device: torch.device) -> CudaStreams | None:
    """None where there are none: the host does all, in order."""
    return CudaStreams(device) if device.type == "cuda" else None
