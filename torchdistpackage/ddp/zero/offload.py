"""Masters, sums of gradients and what the optimizer steps in host memory.

The optimizer's state follows by itself: an optimizer makes it where its parameters are.

The device never waits for the host, and the host waits once a bucket, for the
gradients that its step is about to read. Copies run on two streams, one for each direction, from
and to pinned memory; what writes where another copy reads or writes waits for its event.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchdistpackage.ddp.zero.param_buffer import CudaStreams, MasterStore, Stream
from torchdistpackage.ddp.zero.shard_bounds import SLICE_BYTES
from torchdistpackage.errors import LayoutError

AHEAD = 2
"""Buckets on their way down while one is stepped: one that travels and one that is next."""

PIECE_BYTES = 64 * 2**20
"""The next piece is about as large as all before it, at most this unless one tensor needs more."""

CopyEvent = Any  # torch.cuda's, or a test's double of it


class Offload(MasterStore):
    """Copies in host memory of slices of one device; on the CPU, plain copies.

    bytes: kept so far, without the optimizer's state. streams: of the device, by default CUDA's.
    """

    def __init__(self, device: torch.device, streams: "CopyStreams | None" = None):
        streams = streams or streams_of(device)
        self._device, self._streams = device, streams
        self.bytes = self.ahead = 0
        if streams is not None:
            self.ahead = AHEAD
            self._arena = Arena(streams.pinned)
            self._down, self._up = streams.stream(), streams.stream()
            self._came: dict[int, CopyEvent] = {}  # by address of what is kept: copied there
            self._read: dict[int, CopyEvent] = {}  # and copied from there

    def allocate(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        self.bytes += like.numel() * dtype.itemsize
        if self._streams is None:
            return torch.empty(like.shape, dtype=dtype)
        return self._arena.take(like.numel(), dtype)

    def offload(self, host: Tensor, device: Tensor) -> None:
        if self._streams is None:
            super().offload(host, device)
            return
        # cast here: a copy that casts may go through memory that is not pinned, and wait
        device = device.to(host.dtype)
        self._down.wait_event(self._streams.current().record_event())
        if (read := self._read.get(host.data_ptr())) is not None:
            self._down.wait_event(read)
        self._streams.copy(self._down, host, device)
        self._came[host.data_ptr()] = self._down.record_event()

    def to_device(self, host: Tensor, device: Tensor) -> None:
        """The current stream waits and the host does not."""
        if self._streams is None:
            super().to_device(host, device)
            return
        current, kept = self._streams.current(), host
        if host.dtype != device.dtype:
            self.wait(host)
            num_bytes = device.numel() * device.itemsize
            host = self._streams.pinned(num_bytes).view(device.dtype).copy_(host)
        self._up.wait_event(current.record_event())
        if (came := self._came.get(kept.data_ptr())) is not None:
            self._up.wait_event(came)
        self._streams.copy(self._up, device, host)
        event = self._read[kept.data_ptr()] = self._up.record_event()
        current.wait_event(event)

    def here(self, host: Tensor) -> Tensor:
        if self._streams is None:
            return host
        device = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self.to_device(host, device)
        return device

    def free(self, host: Tensor) -> None:
        if self._streams is not None and (came := self._came.get(host.data_ptr())) is not None:
            self._streams.current().wait_event(came)

    def wait(self, *hosts: Tensor) -> None:
        if self._streams is None:
            return
        for events in (self._came, self._read):
            for address in [host.data_ptr() for host in hosts] or list(events):
                if (event := events.pop(address, None)) is not None:
                    event.synchronize()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Inside, torch has this rank's share of the cores: the device's ranks do not compute."""
        before = torch.get_num_threads()
        threads = before if self._streams is None else max(before, cores_of_a_rank())
        if threads == before:
            yield
            return
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class Arena:
    """Many tensors in a few large pieces of `memory`, which are given back all together.

    Pieces are powers of two, to which torch rounds each tensor of pinned memory up, by a third in
    the mean. Here the rest of a piece is for the tensors that follow. num_bytes: of the pieces.
    """

    def __init__(self, memory: Callable[[int], Tensor]):
        self._memory = memory
        self._rests: list[Tensor] = []
        self.num_bytes = 0

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """An empty one (num_elements,)."""
        needed = num_elements * dtype.itemsize
        size_bytes = -(-needed // SLICE_BYTES) * SLICE_BYTES
        rest = next((i for i, rest in enumerate(self._rests) if len(rest) >= size_bytes), None)
        if rest is None:
            as_before = 1 << max(0, min(self.num_bytes, PIECE_BYTES).bit_length() - 1)
            size = max(1 << max(0, size_bytes - 1).bit_length(), as_before)
            rest = len(self._rests)
            self._rests.append(self._memory(size))
            self.num_bytes += size
        piece = self._rests[rest]
        self._rests[rest] = piece[size_bytes:]
        return piece[:needed].view(dtype)


class CopyStreams(CudaStreams):
    """Streams on which slices are copied to pinned host memory and back."""

    def stream(self) -> Stream:
        """Another one."""
        return torch.cuda.Stream(self._device)

    def copy(self, stream: Stream, to: Tensor, source: Tensor) -> None:
        """Copy on `stream` between the device and pinned memory, of one dtype."""
        with self.on(stream):
            to.copy_(source, non_blocking=True)
        (source if source.is_cuda else to).record_stream(stream)

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory (num_bytes,) that a device copies from and to by itself."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def streams_of(device: torch.device) -> CopyStreams | None:
    """None where there are none: the host does all, in order."""
    return CopyStreams(device) if device.type == "cuda" else None


def cores_of_a_rank() -> int:
    """Cores for this process, which the ranks of the node share unless each is bound."""
    everything = os.cpu_count() or 1
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else everything
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if free == everything else 1
    return max(1, free // ranks)


def check_offload(optimizer: Optimizer) -> None:
    """Raise LayoutError if a param group asks for a step in a CUDA graph."""
    for number, group in enumerate(optimizer.param_groups):
        if group.get("capturable"):
            raise LayoutError(
                f"param group {number} of {type(optimizer).__name__} is capturable, but with "
                f"offload its step runs on the CPU; set capturable=False, or offload=False"
            )
