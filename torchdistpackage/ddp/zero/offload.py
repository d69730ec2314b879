"""Masters, sums of gradients and optimizer state in host memory, and the copies both ways.

One rule: the device never waits for the host and the host waits once a bucket, for the gradients
that its step is about to read. Copies run on two streams, one for each direction, from and to
pinned memory; whoever writes where another copy reads or writes waits for its event. State follows
by itself: an optimizer makes it where its parameters are.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchdistpackage.ddp.zero.arena import Arena
from torchdistpackage.ddp.zero.streams import CopyEvent, CopyStreams, streams_of
from torchdistpackage.errors import LayoutError

AHEAD = 2
"""Buckets on their way down while one is stepped: one that travels and one that is next."""


class Offload:
    """Host memory for what belongs to tensors of one device; on the CPU, plain copies.

    bytes: kept so far. The optimizer's state comes on top, AdamW's is two more for each master.
    streams: of the device, by default CUDA's.
    """

    def __init__(self, device: torch.device, streams: CopyStreams | None = None):
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
        """An empty tensor (n,) in host memory, as long as `like` (n,) on the device."""
        self.bytes += like.numel() * dtype.itemsize
        if self._streams is None:
            return torch.empty(like.shape, dtype=dtype)
        return self._arena.take(like.numel(), dtype)

    def offload(self, host: Tensor, device: Tensor) -> None:
        """Begin to copy; `device` may go at once, and be overwritten after `free(host)`."""
        if self._streams is None:
            if host is not device:
                host.copy_(device)
            return
        # cast here: a copy that casts may go through memory that is not pinned, and wait
        device = device.to(host.dtype)
        self._down.wait_event(self._streams.current().record_event())
        if (read := self._read.get(host.data_ptr())) is not None:
            self._down.wait_event(read)
        self._streams.copy(self._down, host, device)
        self._came[host.data_ptr()] = self._down.record_event()

    def to_device(self, host: Tensor, device: Tensor) -> None:
        """Copy, cast to the dtype of `device`; the current stream waits and the host does not.

        `host` must stay as it is until `wait(host)`.
        """
        if self._streams is None:
            device.copy_(host)
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
        """A copy on the device, to be added to on the current stream: the host does not wait."""
        if self._streams is None:
            return host
        device = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        self.to_device(host, device)
        return device

    def free(self, host: Tensor) -> None:
        """What follows on the current stream may overwrite what was copied to `host`."""
        if self._streams is not None and (came := self._came.get(host.data_ptr())) is not None:
            self._streams.current().wait_event(came)

    def wait(self, *hosts: Tensor) -> None:
        """Until the host may read and write these, by default all that is kept; the device goes
        on."""
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


def cores_of_a_rank() -> int:
    """Those this process may run on, shared with the other ranks of the node unless it is bound."""
    everything = os.cpu_count() or 1
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else everything
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if free == everything else 1
    return max(1, free // ranks)


def check_offload(optimizer: Optimizer) -> None:
    """See that a step on the CPU is possible.

    Raises:
        LayoutError: a param group asks for a step in a CUDA graph.
    """
    for number, group in enumerate(optimizer.param_groups):
        if group.get("capturable"):
            raise LayoutError(
                f"param group {number} of {type(optimizer).__name__} is capturable, but with "
                f"offload its step runs on the CPU; set capturable=False, or offload=False"
            )
