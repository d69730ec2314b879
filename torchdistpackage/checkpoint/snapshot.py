"""What one rank writes of a state: its tensors by key, either the run's own memory or host copies.

A save in turn writes from the run's memory, which nobody changes meanwhile. A save beside the steps
writes from copies (`HostCopies`), which are made between two steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.checkpoint.manifest import TensorChunk, TensorEntry
from torchdistpackage.checkpoint.parts import Params, TopologyRank, held
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.errors import CheckpointError
from torchdistpackage.layout.derive import Box

Extras = Mapping[str, int | Tensor]
"""What belongs to one rank alone: random states, positions."""

EXTRA = "extra/"
"""Before the keys of a rank's own tensors in its file."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The file of one rank, before it is written.

    tensors: by key; frozen: keys of those that only who sets them by hand changes. entries: the
    global tensors that they are pieces of. integers: of the extras. arrived: waits until copies
    that a device makes are there.
    """

    file: str
    tensors: Mapping[str, Tensor]
    frozen: frozenset[str]
    entries: Mapping[str, TensorEntry]
    integers: Mapping[str, int]
    arrived: Callable[[], None] = lambda: None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def take_snapshot(
    file: str,
    params: Params,
    place: TopologyRank,
    optimizer: torch.optim.Optimizer | None,
    extras: Extras,
) -> Snapshot:
    """What the rank `place` owns, as views of the run's memory, under the name `file`.

    Raises:
        CheckpointError: the optimizer has state of a kind that has no place, or two tensors of
            different layouts share memory.
    """
    tensors: dict[str, Tensor] = {}
    frozen: set[str] = set()
    entries: dict[str, TensorEntry] = {}
    for each in held(params, place, optimizer):
        if each.owned is None:
            continue
        known = entries.get(each.name, TensorEntry(each.shape, dtype_name(each.dtype), ()))
        pieces = list(known.pieces)
        for where, tensor in each.owned:
            key = f"{each.name}[{len(pieces)}]"
            tensors[key] = tensor
            if each.is_frozen:
                frozen.add(key)
            pieces.append(TensorChunk(file, key, *box_of(where)))
        entries[each.name] = replace(known, pieces=tuple(pieces))
    _refuse_shared(tensors)
    integers: dict[str, int] = {}
    for name, value in extras.items():
        if isinstance(value, Tensor):
            tensors[EXTRA + name] = value.detach()
        else:
            integers[name] = int(value)
    return Snapshot(file, tensors, frozenset(frozen), entries, integers)


def _refuse_shared(tensors: Mapping[str, Tensor]) -> None:
    """A load would fill memory that two tensors share twice, from files that may differ."""
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
    """(offset, lengths) of a block."""
    return tuple(s.start for s in where), tuple(s.stop - s.start for s in where)


class HostCopies:
    """Host memory that one snapshot after another is copied into.

    The first copy allocates it. Pinned, and filled by a stream of its own, where the state is on a
    CUDA device: the current stream then waits for the copies and the host does not.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._versions: dict[str, tuple[int, int]] = {}
        self._stream: Any = None

    def copy(self, snapshot: Snapshot) -> Snapshot:
        """The same state in host memory, which the next call overwrites.

        A frozen parameter is copied anew only when it has changed: autograd's version counter of a
        tensor tells, which every operation in place on the tensor raises, but none on its `.data`.
        """
        buffers = {key: self._buffer(key, x) for key, x in snapshot.tensors.items()}
        self._buffers = buffers
        due = {key: x for key, x in snapshot.tensors.items() if self._has_changed(key, x, snapshot)}
        device = next((x.device for x in due.values() if x.is_cuda), None)
        if device is None:
            for key, x in due.items():
                buffers[key].copy_(x)
            return replace(snapshot, tensors=buffers)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for key, x in due.items():
                buffers[key].copy_(x, non_blocking=True)
                if x.is_cuda:
                    x.record_stream(self._stream)
            done = torch.cuda.Event()
            done.record(self._stream)
        # the next update must not overtake the copy
        current.wait_event(done)
        return replace(snapshot, tensors=buffers, arrived=done.synchronize)

    def _buffer(self, key: str, x: Tensor) -> Tensor:
        known = self._buffers.get(key)
        if known is not None and (known.shape, known.dtype) == (x.shape, x.dtype):
            return known
        self._versions.pop(key, None)
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)

    def _has_changed(self, key: str, x: Tensor, snapshot: Snapshot) -> bool:
        version = (x.data_ptr(), x._version)
        if key in snapshot.frozen and self._versions.get(key) == version:
            return False
        self._versions[key] = version
        return True
