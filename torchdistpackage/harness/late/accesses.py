"""Record which stream reads and writes which bytes, and which accesses are ordered.

Order is what torch's own vector clocks say (torch.cuda._sanitizer, pure Python). What the
host does is a stream of its own, which all work issued later comes after.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torchdistpackage.errors import ConfigError, RaceError
from torchdistpackage.harness.late.call import issued_at

HOST = -1
_CLOCKS = (
    "create_stream",
    "update_seq_num",
    "record_state",
    "stream_wait_for_event",
    "all_streams_wait_for_event",
    "all_streams_wait_for_stream",
    "is_ordered_after",
)


@dataclass
class Access:
    """One access. in_flight: by an unawaited call, which keeps the memory. in_backward: torch's
    engine runs it on the stream of its forward and keeps the memory for it."""

    number: int
    stream: int
    what: str
    writes: bool
    shape: tuple[int, ...]
    where: str
    in_backward: bool
    in_flight: bool = False


@dataclass
class StorageRange:
    """Bytes of a storage that were read and written alike. reads: the last one of each stream."""

    first: int
    after: int
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)

    def part(self, first: int, end: int) -> "StorageRange":
        return StorageRange(first, end, self.write, dict(self.reads))

    @property
    def accesses(self) -> list[Access]:
        return [*self.reads.values(), *([self.write] if self.write is not None else [])]


@dataclass
class TrackedStorage:
    """A storage with the accesses of its bytes. made_on: the stream whose allocator gets it back.
    kept_for: streams of `record_stream`.
    """

    ref: StorageWeakRef  # while it is held, no other storage gets the same number
    made_on: int
    on_host: bool = False
    pieces: list[StorageRange] = field(default_factory=list)
    kept_for: set[int] = field(default_factory=set)

    def cut(self, first: int, end: int, full: bool) -> tuple[list[Access], list[StorageRange]]:
        """Return earlier accesses of these bytes, and the ranges in which to note a new access.
        full: the new access covers all of them, so one range is enough.
        """
        inside, outside, at = [], [], first
        for piece in sorted(self.pieces, key=lambda p: p.first):
            low, high = max(first, piece.first), min(end, piece.after)
            if low >= high:
                outside.append(piece)
                continue
            if piece.first < low:
                outside.append(piece.part(piece.first, low))
            if high < piece.after:
                outside.append(piece.part(high, piece.after))
            if at < low:
                inside.append(StorageRange(at, low))
            inside.append(piece.part(low, high))
            at = high
        if at < end:
            inside.append(StorageRange(at, end))
        earlier = [access for piece in inside for access in piece.accesses]
        if full:
            inside = [StorageRange(first, end)]
        self.pieces = outside + inside
        return earlier, inside


class History:
    """All accesses of tracked storages, and the order that streams and events give them. names:
    names of streams, for messages. num_host_syncs: times that the host waited for a stream.

    Raises:
        ConfigError: this torch has other clocks.
    """

    def __init__(self) -> None:
        from torch.cuda import _sanitizer

        clocks = getattr(_sanitizer, "StreamSynchronizations", None)
        if missing := [name for name in _CLOCKS if not hasattr(clocks, name)]:
            raise ConfigError(
                f"torch {torch.__version__} has no torch.cuda._sanitizer.StreamSynchronizations "
                f"with {', '.join(missing)}, which the order of streams stands on"
            )
        self._clocks = _sanitizer.StreamSynchronizations()
        self.names: dict[int, str] = {}
        self.num_host_syncs = self._num_ops = self._num_events = 0
        self._memories: dict[int, TrackedStorage] = {}
        self._shared: dict[int, TrackedStorage] = {}  # those that several streams have used
        self.stream("stream 0 (the default)")
        self.names[HOST] = "the host"
        self._clocks.create_stream(HOST)
        self._host_event = self.event()

    # -- order ---------------------------------------------------------------------------

    def stream(self, name: str = "") -> int:
        number = max(len(self.names) - 1, 0)
        self.names[number] = name or f"stream {number}"
        self._clocks.create_stream(number)
        return number

    def event(self) -> int:
        self._num_events += 1
        return self._num_events

    def record(self, event: int, stream: int) -> None:
        self._clocks.record_state(event, stream)

    def wait(self, stream: int, event: int) -> None:
        self.see_frees()
        self._clocks.stream_wait_for_event(stream, event)

    def host_waits_for_event(self, event: int) -> None:
        self.see_frees()
        self.num_host_syncs += 1
        self._clocks.all_streams_wait_for_event(event)

    def host_waits_for(self, stream: int) -> None:
        self.see_frees()
        self.num_host_syncs += 1
        self._clocks.all_streams_wait_for_stream(stream)

    # -- memory --------------------------------------------------------------------------

    def memory(self, x: Tensor, stream: int) -> TrackedStorage:
        storage = x.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = self._memories[storage._cdata] = TrackedStorage(
                StorageWeakRef(storage), stream
            )
        return memory

    def is_on_host(self, x: Tensor) -> bool:
        memory = self._memories.get(x.untyped_storage()._cdata)
        return memory is not None and memory.on_host

    def resized(self, storage: torch.UntypedStorage, stream: int, reason: str) -> None:
        """Note that a storage was resized: its old memory is freed, and its new memory belongs to
        `stream`.
        """
        if (memory := self._memories.pop(storage._cdata, None)) is not None:
            self._shared.pop(storage._cdata, None)
            self._freed(memory, reason)
        self._memories[storage._cdata] = TrackedStorage(StorageWeakRef(storage), stream)

    def see_frees(self) -> None:
        """Check memory that was freed since the last time."""
        gone = [key for key, memory in self._shared.items() if memory.ref.expired()]
        for key in gone:
            del self._memories[key]
            self._freed(self._shared.pop(key), "its last tensor went")
        if self._num_ops % 1000 == 0:
            live = {k: m for k, m in self._memories.items() if not m.ref.expired()}
            self._memories = live

    def _freed(self, memory: TrackedStorage, reason: str) -> None:
        if memory.on_host:  # torch's allocator waits for copies from and to pinned memory
            return
        owner = memory.made_on
        free = Access(0, owner, f"free ({reason})", True, (), issued_at(), False)
        for access in (a for piece in memory.pieces for a in piece.accesses):
            # `record_stream` keeps it until all that was given to those streams by now is over
            in_use = access.in_flight or access.in_backward or access.stream in memory.kept_for
            in_use = in_use or any(self._is_after(stream, access) for stream in memory.kept_for)
            if not in_use and not self._is_after(owner, access):
                self._refuse(free, access)

    # -- work ----------------------------------------------------------------------------

    def run(
        self, stream: int, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor]
    ) -> list[Access]:
        """Record an operation. RaceError: nothing orders it and another stream's use of a byte."""
        self.see_frees()
        self._num_ops += 1
        self._clocks.update_seq_num(stream, self._num_ops)
        where, accesses = issued_at(), []
        in_backward = torch._C._current_graph_task_id() != -1
        for tensors, is_write in ((reads, False), (writes, True)):
            for x in tensors:
                access = Access(
                    self._num_ops, stream, name, is_write, tuple(x.shape), where, in_backward
                )
                self._note(x, access)
                accesses.append(access)
        if stream == HOST:
            self.record(self._host_event, HOST)
            self._clocks.all_streams_wait_for_event(self._host_event)
        return accesses

    def _note(self, x: Tensor, access: Access) -> None:
        if x.layout is not torch.strided or x.is_meta or not x.numel():
            return
        memory = self.memory(x, access.stream)
        reach = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        first = x.storage_offset() * x.itemsize
        earlier, pieces = memory.cut(first, first + reach * x.itemsize, access.writes)
        for other in earlier:
            if (access.writes or other.writes) and not self._is_after(access.stream, other):
                self._refuse(access, other)
        for piece in pieces:
            if access.writes:
                piece.write = access
            else:
                piece.reads[access.stream] = access
        if access.stream != memory.made_on:
            self._shared[memory.ref.cdata] = memory

    def _is_after(self, stream: int, access: Access) -> bool:
        return self._clocks.is_ordered_after(stream, access.number, access.stream)

    def _refuse(self, access: Access, earlier: Access) -> NoReturn:
        raise RaceError(
            f"{access.what} on {self.names[access.stream]} {_verb(access)} memory that "
            f"{earlier.what} on {self.names[earlier.stream]} {_verb(earlier)}, a tensor of shape "
            f"{earlier.shape}, and nothing orders the two; wait for the stream or an event of it"
            f"{access.where}\nthe earlier access was issued{earlier.where}"
        )


def _verb(access: Access) -> str:
    return "writes" if access.writes else "reads"
