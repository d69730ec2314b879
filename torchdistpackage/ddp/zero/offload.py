"""Offload of masters, summed gradients and the optimizer's step to host memory.

The optimizer's state follows, because an optimizer creates it on the device of its parameters.

The device never waits for the host. The host waits once for each bucket, for the gradients that its
step is about to read. Copies run on two streams, one for each direction, from and to pinned memory.
An operation that writes where a copy reads or writes waits for that copy's event.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchdistpackage.comm.streams import CudaStreams, streams_of
from torchdistpackage.ddp.zero.param_buffer import MasterStore
from torchdistpackage.ddp.zero.shard_bounds import SLICE_BYTES
from torchdistpackage.errors import LayoutError

AHEAD = 2
"""Number of buckets being copied to the host during a step: one in flight and the next."""

PIECE_BYTES = 64 * 2**20
"""Largest piece of memory, unless one tensor needs more. A piece is about as large as all earlier
ones together.
"""

CopyEvent = Any  # torch.cuda.Event, or a test's double of it


class Offload(MasterStore):
    """A store that keeps copies of one device's slices in host memory.

    bytes: bytes allocated so far, without the optimizer's state.
    streams: the copy streams; by default those of a CUDA device. A CPU has none, and copies in
        order.
    """

    def __init__(self, device: torch.device, streams: "CudaStreams | None" = None):
        streams = streams or streams_of(device)
        self._device, self._streams = device, streams
        self.bytes = self.ahead = 0
        if streams is not None:
            self.ahead = AHEAD
            self._arena = Arena(streams.pinned)
            self._down, self._up = streams.stream(), streams.stream()
            # by address in host memory: the end of the last copy to it, and of the last from it
            self._came: dict[int, CopyEvent] = {}
            self._read: dict[int, CopyEvent] = {}

    def allocate(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        self.bytes += like.numel() * dtype.itemsize
        if self._streams is None:
            return torch.empty(like.shape, dtype=dtype)
        return self._arena.take(like.numel(), dtype)

    def offload(self, host: Tensor, device: Tensor) -> None:
        if self._streams is None:
            super().offload(host, device)
            return
        # cast on the device: a casting copy may go through pageable memory, and block the host
        device = device.to(host.dtype)
        # the kernels that compute the source must have finished
        self._down.wait_event(self._streams.current().record_event())
        if (last_read := self._read.get(host.data_ptr())) is not None:
            # an earlier copy to the device may still read this host memory
            self._down.wait_event(last_read)
        self._streams.copy(self._down, host, device)
        self._came[host.data_ptr()] = self._down.record_event()

    def to_device(self, host: Tensor, device: Tensor) -> None:
        """Copy host memory to the device; the current stream waits for it, and the host
        does not.
        """
        if self._streams is None:
            super().to_device(host, device)
            return
        current, stored = self._streams.current(), host
        if host.dtype != device.dtype:
            # the host casts here, so the copy that fills `host` must have ended
            self.wait(host)
            num_bytes = device.numel() * device.itemsize
            host = self._streams.pinned(num_bytes).view(device.dtype).copy_(host)
        # kernels issued before may still use the destination
        self._up.wait_event(current.record_event())
        if (arrived := self._came.get(stored.data_ptr())) is not None:
            # the copy to host memory must have ended before it is read
            self._up.wait_event(arrived)
        self._streams.copy(self._up, device, host)
        event = self._read[stored.data_ptr()] = self._up.record_event()
        # kernels issued from here on read what the copy brings
        current.wait_event(event)

    def here(self, host: Tensor) -> Tensor:
        if self._streams is None:
            return host
        device = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self.to_device(host, device)
        return device

    def free(self, host: Tensor) -> None:
        if self._streams is not None and (arrived := self._came.get(host.data_ptr())) is not None:
            # kernels that overwrite the source must wait until it is copied to the host
            self._streams.current().wait_event(arrived)

    def wait(self, *hosts: Tensor) -> None:
        if self._streams is None:
            return
        for events in (self._came, self._read):
            for address in [host.data_ptr() for host in hosts] or list(events):
                if (event := events.pop(address, None)) is not None:
                    event.synchronize()  # here the host waits: its step reads or writes this memory

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Give torch this rank's share of the cores: the step runs there while the device waits."""
        previous = torch.get_num_threads()
        threads = previous if self._streams is None else max(previous, cores_of_a_rank())
        if threads == previous:
            yield
            return
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(previous)


class Arena:
    """An allocator of many tensors in a few large pieces of `memory`, which are freed together.

    torch rounds each pinned tensor up to a power of two, which wastes a third on average. So pieces
    are powers of two, and the rest of a piece serves later tensors.

    num_bytes: bytes of all pieces.
    """

    def __init__(self, memory: Callable[[int], Tensor]):
        self._memory = memory
        self._rests: list[Tensor] = []
        self.num_bytes = 0

    def take(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor (num_elements,)."""
        needed = num_elements * dtype.itemsize
        size_bytes = -(-needed // SLICE_BYTES) * SLICE_BYTES
        number = next((i for i, gaps in enumerate(self._rests) if len(gaps) >= size_bytes), None)
        if number is None:
            doubled = 1 << max(0, min(self.num_bytes, PIECE_BYTES).bit_length() - 1)
            size = max(1 << max(0, size_bytes - 1).bit_length(), doubled)
            number = len(self._rests)
            self._rests.append(self._memory(size))
            self.num_bytes += size
        piece = self._rests[number]
        self._rests[number] = piece[size_bytes:]
        return piece[:needed].view(dtype)


def cores_of_a_rank() -> int:
    """Return the number of cores for this process, which shares them with other ranks of its node.

    Ranks are assumed to be spread evenly over the cores, as if each were bound near its GPU.
    """
    everything = os.cpu_count() or 1
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else everything
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, free // max(1, ranks * free // everything))


def check_offload(optimizer: Optimizer) -> None:
    """Raise LayoutError if a param group wants its step in a CUDA graph."""
    for number, group in enumerate(optimizer.param_groups):
        if group.get("capturable"):
            raise LayoutError(
                f"param group {number} of {type(optimizer).__name__} is capturable, but with "
                f"offload its step runs on the CPU; set capturable=False, or offload=False"
            )
