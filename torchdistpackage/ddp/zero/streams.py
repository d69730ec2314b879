"""The streams on which slices are copied to host memory and back, and the memory for that.

One rule: what is copied on one stream and used on another waits for an event, and memory of the
device that a stream still reads or writes is not given to anybody else.
"""

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor


class CopyEvent(Protocol):
    def synchronize(self) -> None:
        """The host waits for all that was on its stream before it."""
        ...


class Stream(Protocol):
    def record_event(self) -> CopyEvent: ...

    def wait_event(self, event: CopyEvent) -> None:
        """What follows on this stream begins after what was before the event on its own."""
        ...


class CopyStreams(Protocol):
    """Of one device."""

    def stream(self) -> Stream:
        """Another one."""
        ...

    def current(self) -> Stream:
        """The one that computes, as the caller's thread has it."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Inside, it is the current one."""
        ...

    def copy(self, stream: Stream, to: Tensor, source: Tensor) -> None:
        """Copy on `stream` between the device and pinned memory, of one dtype."""
        ...

    def keep(self, x: Tensor) -> None:
        """The memory of `x` is given to nobody before the current stream is done with it."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory (num_bytes,) that a device copies from and to by itself."""
        ...


class CudaStreams:
    def __init__(self, device: torch.device):
        self._device = device

    def stream(self) -> Stream:
        return torch.cuda.Stream(self._device)

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)  # type: ignore[arg-type]

    def copy(self, stream: Stream, to: Tensor, source: Tensor) -> None:
        with self.on(stream):
            to.copy_(source, non_blocking=True)
        (source if source.is_cuda else to).record_stream(stream)  # type: ignore[arg-type]

    def keep(self, x: Tensor) -> None:
        x.record_stream(self.current())  # type: ignore[arg-type]

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def streams_of(device: torch.device) -> CopyStreams | None:
    """None where there are none: the host does all, in order."""
    return CudaStreams(device) if device.type == "cuda" else None
