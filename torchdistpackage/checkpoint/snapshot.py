"""A snapshot of the tensors that one rank writes, in the run's own memory or in host copies.

A save that steps wait for writes from the run's memory, which nothing changes meanwhile. A save
beside the steps writes from copies (`HostCopies`), made between two steps.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.checkpoint.manifest import TensorChunk, TensorEntry
from torchdistpackage.checkpoint.parts import Params, TopologyRank, saved_tensors
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.comm.streams import streams_of
from torchdistpackage.ddp.zero.offload import Arena
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.derive import Box

Extras = Mapping[str, int | Tensor]
"""State that belongs to one rank alone, such as random states and positions in the data."""

EXTRA = "extra/"
"""Prefix of the keys of a rank's extras in its file."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The contents of one rank's file, before it is written.

    tensors: the tensors by key. frozen: keys of tensors that no optimizer updates. volatile: keys
    of tensors that a forward may change too, such as buffers.
    entries: the global tensors that they are pieces of. integers: extras that are numbers.
    arrived: waits until asynchronous copies from a device have finished.
    """

    file: str
    tensors: Mapping[str, Tensor]
    frozen: frozenset[str]
    entries: Mapping[str, TensorEntry]
    integers: Mapping[str, int]
    arrived: Callable[[], None] = lambda: None
    volatile: frozenset[str] = frozenset()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def take_snapshot(
    file: str,
    params: Params,
    topology_rank: TopologyRank,
    optimizer: torch.optim.Optimizer | None,
    extras: Extras,
) -> Snapshot:
    """Return the tensors that a rank owns, as views of the run's memory, for the file `file`.

    Raises:
        CheckpointError: the optimizer has state that cannot be placed in the global tensor, or two
            tensors with different layouts share memory.
    """
    tensors: dict[str, Tensor] = {}
    frozen: set[str] = set()
    volatile: set[str] = set()
    entries: dict[str, TensorEntry] = {}
    for saved_tensor in saved_tensors(params, topology_rank, optimizer):
        if saved_tensor.owned is None:
            continue
        entry = entries.get(
            saved_tensor.name, TensorEntry(saved_tensor.shape, dtype_name(saved_tensor.dtype), ())
        )
        pieces = list(entry.pieces)
        for where, tensor in saved_tensor.owned:
            key = f"{saved_tensor.name}[{len(pieces)}]"
            tensors[key] = tensor
            if saved_tensor.is_frozen:
                frozen.add(key)
            # a forward may move a frozen parameter, such as one of a teacher
            if saved_tensor.is_buffer or saved_tensor.is_frozen:
                volatile.add(key)
            pieces.append(TensorChunk(file, key, *box_of(where)))
        entries[saved_tensor.name] = replace(entry, pieces=tuple(pieces))
    _refuse_shared(tensors)
    integers: dict[str, int] = {}
    for name, value in extras.items():
        if isinstance(value, Tensor):
            tensors[EXTRA + name] = value.detach()
            volatile.add(EXTRA + name)
        else:
            integers[name] = int(value)
    return Snapshot(
        file, tensors, frozenset(frozen), entries, integers, volatile=frozenset(volatile)
    )


def _refuse_shared(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that share memory: a load would fill it twice, from files that may differ."""
    spans = sorted(
        (str(x.device), x.data_ptr(), x.data_ptr() + x.nbytes, key)
        for key, x in tensors.items()
        if x.nbytes and x.is_contiguous()
    )
    for (device, _, end, key), (other_device, begin, _, other) in pairwise(spans):
        if device == other_device and begin < end:
            raise CheckpointError(
                f"{key} and {other} share memory; give tied parameters one layout, under one name"
            )


def box_of(where: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the (offset, lengths) of a box."""
    return tuple(s.start for s in where), tuple(s.stop - s.start for s in where)


class HostCopies:
    """Host memory that successive snapshots are copied into; the first copy allocates it.

    For state on a CUDA device the memory is pinned, and copies run on a stream of their own: the
    current stream waits for them, and the host does not.

    deferred: True: `before_update` is called before each update, so forwards and backwards until
    then run beside the copies. False: nothing runs beside them.
    """

    def __init__(self, *, deferred: bool = False) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        self._stream: Any = None
        self._arena: Arena | None = None
        self._deferred = deferred
        self._before_update: Callable[[], None] | None = None

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """Copy a snapshot to host memory, which the next call overwrites.

        It copies a frozen parameter again only if autograd's version counter has changed. In-place
        operations on a tensor raise that counter, but those on its `.data` do not.
        """
        buffers = {key: self._buffer(key, x) for key, x in snapshot.tensors.items()}
        self._buffers = buffers
        due = {key: x for key, x in snapshot.tensors.items() if self._has_changed(key, x, snapshot)}
        streams = next((s for x in due.values() if (s := streams_of(x.device)) is not None), None)
        if streams is None:
            for key, x in due.items():
                buffers[key].copy_(x)
            return replace(snapshot, tensors=buffers)
        if self._stream is None:
            # a stream of its own, so that copies run beside the kernels of the next step
            self._stream = streams.stream()
        current = streams.current()
        # the copies must see the results of the step that the current stream is still computing
        self._stream.wait_stream(current)

        def copy(keys: Iterable[str]) -> Any:
            for key in keys:
                if streams_of(due[key].device) is None:
                    buffers[key].copy_(due[key])
                else:
                    streams.copy(self._stream, buffers[key], due[key])
            return self._stream.record_event()

        # wait for these now, because the next forward may overwrite them
        current.wait_event(copy(key for key in due if key in snapshot.volatile))
        copied = copy(key for key in due if key not in snapshot.volatile)

        def wait() -> None:
            # the next optimizer step must not overwrite the parameters before they are copied
            streams.current().wait_event(copied)

        self._before_update = wait
        if not self._deferred:
            self.before_update()
        return replace(snapshot, tensors=buffers, arrived=copied.synchronize)

    def before_update(self) -> None:
        """Make the current stream wait for unfinished copies of what an update overwrites."""
        if self._before_update is not None:
            self._before_update()
            self._before_update = None

    def _buffer(self, key: str, x: Tensor) -> Tensor:
        """Return host memory for a tensor; reuse that of the last snapshot if it fits."""
        buffer = self._buffers.get(key)
        if buffer is not None and (buffer.shape, buffer.dtype) == (x.shape, x.dtype):
            return buffer
        self._versions.pop(key, None)
        if (streams := streams_of(x.device)) is None:
            return torch.empty(x.shape, dtype=x.dtype)
        if self._arena is None:
            self._arena = Arena(streams.pinned)
        return self._arena.take(x.numel(), x.dtype).view(x.shape)

    def _has_changed(self, key: str, x: Tensor, snapshot: Snapshot) -> bool:
        """Return whether a tensor must be copied, and note its version."""
        version = (x.data_ptr(), x._version)
        if key in snapshot.frozen and self._versions.get(key) == version:
            return False
        self._versions[key] = version
        return True
