"""Streams of a device; simulated ones can replace them (harness/late/streams.py)."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Stream = Any
"""A `torch.cuda.Stream` or its replacement."""


class CudaStreams:
    """Operations on the CUDA streams of one device."""

    def __init__(self, device: torch.device):
        self._device = device

    def stream(self) -> Stream:
        """Return a new stream."""
        return torch.cuda.Stream(self._device)

    def current(self) -> Stream:
        """Return the current stream of the caller's thread."""
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Make `stream` the current one in the block."""
        return torch.cuda.stream(stream)

    def keep(self, x: Tensor) -> None:
        """Keep the allocator from reusing the memory of `x` before the current stream is done."""
        # the allocator knows only the stream that `x` was allocated on
        x.record_stream(self.current())

    def copy(self, stream: Stream, to: Tensor, source: Tensor, *, keeps: bool = True) -> None:
        """Copy on `stream` between the device and pinned memory, of one dtype.

        keeps: False if the caller holds the device's side until a stream has waited for the copy.
        The allocator then reuses the memory in the order of that stream, instead of waiting until
        the host sees that the copy has ended.
        """
        with self.on(stream):
            to.copy_(source, non_blocking=True)
        if not keeps:
            return
        # keep the allocator from reusing the device's side before the copy has ended
        (source if source.is_cuda else to).record_stream(stream)

    def pinned(self, num_bytes: int) -> Tensor:
        """Return pinned host memory (num_bytes,), which a device can copy from and to on its
        own.
        """
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def streams_of(device: torch.device) -> CudaStreams | None:
    """Return the streams of a device; None for a CPU, which works in order."""
    return CudaStreams(device) if device.type == "cuda" else None
