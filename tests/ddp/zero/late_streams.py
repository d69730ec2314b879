"""Streams of a device that is not there: copies run when somebody waits for them, not before.

What a copy writes is NaN until then. What it reads must stay as it was: memory of the host until
the host has waited for it, memory of the device until the stream that computes has. That stream
itself is the host here, as everything that computes runs at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


class Changed(AssertionError):
    """Memory that a copy was reading or writing."""


@dataclass
class Copy:
    """before: those that read what this writes, and must have done so by then."""

    to: Tensor
    source: Tensor
    was: Tensor | None  # None: another copy fills it first
    from_host: bool
    before: list["Copy"]
    is_done: bool = False
    is_seen: bool = False

    def run(self) -> None:
        if self.is_done:
            return
        self.is_done = True
        self.was = self.source.clone() if self.was is None else self.was
        for copy in self.before:
            if not copy.is_done:
                raise Changed("memory was copied to before it had been read")
            copy.see()
        if not self.before and not self.to.isnan().all():
            raise Changed(f"what {len(self.to)} elements are copied to was written to")
        if not self.from_host:
            self.see()
        self.to.copy_(self.was)

    def see(self) -> None:
        """What it reads may change from here on, and has not so far."""
        if self.is_seen:
            return
        self.is_seen = True
        assert self.was is not None
        if not _is_gone(self.source) and not _same_bits(self.source, self.was):
            raise Changed(f"{len(self.was)} elements changed while they were copied")


def _same_bits(x: Tensor, y: Tensor) -> bool:
    """Also of NaN, which padding may hold."""
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def _is_gone(x: Tensor) -> bool:
    """Given back meanwhile, which a device's allocator puts off."""
    return x.untyped_storage().nbytes() < (x.storage_offset() + x.numel()) * x.itemsize


class Event:
    def __init__(self, streams: "LateStreams", stream: "LateStream | None"):
        self._streams, self._stream = streams, stream
        self._end = 0 if stream is None else len(stream.items)
        self._reached = 0  # 1 by another stream, 2 by the host

    def synchronize(self) -> None:
        self._streams.host_waits += 1
        if torch._C._current_graph_task_id() != -1:
            self._streams.host_waits_in_backward += 1
        self.reach(host=True)

    def reach(self, *, host: bool) -> None:
        if self._reached >= 1 + host:
            return
        self._reached = 1 + host
        for item in [] if self._stream is None else self._stream.items[: self._end]:
            if isinstance(item, Event):
                item.reach(host=host)
                continue
            item.run()
            if host:
                item.see()


class LateStream:
    def __init__(self, streams: "LateStreams", name: str):
        self._streams, self.name = streams, name
        self.items: list[Copy | Event] = []

    def record_event(self) -> Event:
        return Event(self._streams, self if self.name else None)

    def wait_event(self, event: Event) -> None:
        self.items.append(event)
        if not self.name:
            event.reach(host=False)

    @property
    def copies(self) -> list[Copy]:
        return [item for item in self.items if isinstance(item, Copy)]


class LateStreams:
    """made: the streams, in order. num_bytes: of pinned memory. computing: has no name."""

    def __init__(self) -> None:
        self.computing = self._now = LateStream(self, "")
        self.made: list[LateStream] = []
        self.num_bytes = self.host_waits = self.host_waits_in_backward = 0
        self._pinned: set[int] = set()

    def stream(self) -> LateStream:
        self.made.append(LateStream(self, f"stream {len(self.made)}"))
        return self.made[-1]

    def current(self) -> LateStream:
        return self._now

    @contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        before, self._now = self._now, stream
        try:
            yield
        finally:
            self._now = before

    def copy(self, stream: LateStream, to: Tensor, source: Tensor) -> None:
        assert to.dtype == source.dtype and (self._is_pinned(to) != self._is_pinned(source))
        source, to = source.detach(), to.detach()
        if not to.numel():
            return
        copies = [copy for each in self.made for copy in each.copies]
        reading = [x for x in copies if not x.is_seen and x.source.data_ptr() == to.data_ptr()]
        fills = any(not x.is_done and x.to.data_ptr() == source.data_ptr() for x in copies)
        was = None if fills else source.clone()
        stream.items.append(Copy(to, source, was, self._is_pinned(source), reading))
        if not reading:
            to.fill_(float("nan"))

    def keep(self, x: Tensor) -> None:
        """Nothing: the stand-in gives memory of the device back to nobody."""

    def pinned(self, num_bytes: int) -> Tensor:
        self.num_bytes += num_bytes
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._pinned.add(memory.untyped_storage()._cdata)
        return memory

    def _is_pinned(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._pinned
