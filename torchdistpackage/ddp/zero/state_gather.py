"""Gathering of parameters' state from the ranks that own shards of them.

First every rank learns from the owners which entries exist, with their shapes and dtypes
(`exchange_schema`); plain numbers come with that. Then shards are gathered in batches
(`batched_gather`), and a rank that gets no result never holds more than it sends.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.comm.groups import for_each_group
from torchdistpackage.comm.p2p import Post
from torchdistpackage.comm.primitives import Group, gather_objects, ranks_of
from torchdistpackage.comm.transport.sharded_flat import start_all_gather_v
from torchdistpackage.ddp.sharded import ParamPartition
from torchdistpackage.errors import CheckpointError, CommError

BATCH_BYTES = 32 * 2**20
"""Most bytes of full tensors in a batch, the memory that a gather needs beside its result. A larger
tensor is a batch of its own."""

_PLAIN = (bool, int, float, complex, str, type(None))
"""Types that are hashable, so that equal entries can be sent once."""

State = dict[Hashable, object]
"""State of one parameter: key -> tensor, number, or whatever the optimizer keeps."""


@dataclass(frozen=True)
class StateEntry:
    """The description of one state entry, from which every rank can create it.

    shape: shape of a tensor that its owner has in full; None: the parameter's shape, cut or not.
    on_cpu: it is on the CPU, whatever the parameter's device.
    value: the value itself, for numbers and other objects that are not sent as tensors.
    """

    key: Hashable
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    on_cpu: bool = False
    value: object = None


StateEntries = tuple[StateEntry, ...]


@dataclass(frozen=True)
class GatherItem:
    """A flat tensor to gather; rank i of the group has elements bounds[i] to bounds[i + 1].

    device: device of the messages.
    own_shard: this rank's elements, 1-D on any device; None if it has none.
    """

    bounds: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    own_shard: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.bounds[-1] * self.dtype.itemsize

    def length(self, index: int) -> int:
        """Return the number of elements of the rank at `index`."""
        return self.bounds[index + 1] - self.bounds[index]


def gather_states(
    local_states: Sequence[tuple[ParamPartition, State]],
    *,
    to: int | None = None,
    cpu: bool = False,
) -> dict[Hashable, State]:
    """Return the gathered state of each parameter, by its position in `local_states`.

    All ranks call it. It needs memory for the result and one batch.

    local_states: each parameter with this rank's shard of its state.
    to: index, in each sharding group, of the rank that gets the state; default: all ranks get it.
    cpu: put tensors on the CPU; otherwise they are on the parameter's device, or on the CPU if they
        were offloaded.

    Raises:
        CheckpointError: ranks hold different kinds of state for one parameter.
        CommError: `to` is not an index in a group.
    """
    states: dict[Hashable, State] = {i: {} for i in range(len(local_states))}
    number = {id(partition): i for i, (partition, _) in enumerate(local_states)}
    for group, partitions in for_each_group(
        partition for partition, _ in local_states if partition.bounds[-1]
    ):
        receives = to is None or group.rank() == to
        members = [number[id(p)] for p in partitions]
        entries = exchange_schema(group, {i: local_states[i] for i in members})
        waiting: list[tuple[int, StateEntry]] = []
        items: list[GatherItem] = []
        for i in members:
            partition, state = local_states[i]
            for entry in entries[i]:
                if entry.dtype is not None and entry.value is None:
                    waiting.append((i, entry))
                    items.append(item_of(partition, entry, state))
                if receives:
                    states[i][entry.key] = made_of(
                        entry, partition
                    )  # also reserves the key's position
        for (i, entry), flat in zip(waiting, batched_gather(items, group, to), strict=True):
            if flat is not None:
                flat = flat.cpu() if cpu or entry.on_cpu else flat
                partition = local_states[i][0]
                states[i][entry.key] = (
                    partition.shaped(flat) if entry.shape is None else flat.view(entry.shape)
                )
    return states


def exchange_schema(
    group: Group, local_states: Mapping[int, tuple[ParamPartition, State]]
) -> dict[int, StateEntries]:
    """Return the state entries that the owners of each parameter have."""
    # one object for equal entries, which pickle then writes once
    unique: dict[StateEntries, StateEntries] = {}
    sent: list[StateEntries | None] = []
    for partition, state in local_states.values():
        own_entries = tuple(entry_of(partition, key, value) for key, value in state.items())
        if all(isinstance(entry.value, _PLAIN) for entry in own_entries):
            own_entries = unique.setdefault(own_entries, own_entries)
        sent.append(None if partition.own_tensor is None else own_entries)
    of_ranks = gather_objects(sent, group)
    result: dict[int, StateEntries] = {}
    for i, of_one in zip(local_states, zip(*of_ranks, strict=True), strict=True):
        owned = [entries for entries in of_one if entries is not None]
        layouts = {tuple((f.key, f.dtype, f.shape) for f in entries) for entries in owned}
        if len(layouts) > 1:
            raise CheckpointError(
                f"ranks {ranks_of(group)} have different state for {local_states[i][0].name}: "
                f"{' and '.join(sorted(map(str, layouts)))}; step them together, or let one rank "
                f"own whole parameters (whole=True)"
            )
        result[i] = owned[0]
    return result


def entry_of(partition: ParamPartition, key: Hashable, value: object) -> StateEntry:
    """Describe one value of this rank's state."""
    if not isinstance(value, Tensor):
        return StateEntry(key, value=value)
    on_cpu = value.device.type == "cpu"
    if value.dim() == 0 and not (partition.whole and partition.spec.parameter.dim() == 0):
        return StateEntry(key, value.dtype, (), on_cpu, value.item())
    if partition.own_tensor is not None and value.shape == partition.own_tensor.shape:
        return StateEntry(key, value.dtype, None, on_cpu)
    return StateEntry(key, value.dtype, tuple(value.shape), on_cpu)


def item_of(partition: ParamPartition, entry: StateEntry, state: State) -> GatherItem:
    """Return the gather of one state entry that is sent as a tensor."""
    assert entry.dtype is not None
    spec = partition.spec
    value = state.get(entry.key)
    own_elements = value if isinstance(value, Tensor) else None
    bounds = partition.bounds
    if entry.shape is not None:  # the first owner sends all of it
        owner = next(r for r in range(spec.group.size()) if bounds[r] < bounds[r + 1])
        size = torch.Size(entry.shape).numel()
        bounds = tuple(0 if r <= owner else size for r in range(len(bounds)))
        own_elements = (
            own_elements.reshape(-1)
            if own_elements is not None and spec.group.rank() == owner
            else None
        )
    elif partition.whole and own_elements is not None:
        own_elements = partition.flat(own_elements)
    return GatherItem(bounds, entry.dtype, spec.parameter.device, own_elements)


def made_of(entry: StateEntry, partition: ParamPartition) -> object:
    """Create a value that was not sent as a tensor."""
    if entry.dtype is None or entry.value is None:
        return entry.value
    device = torch.device("cpu") if entry.on_cpu else partition.spec.parameter.device
    return torch.tensor(entry.value, dtype=entry.dtype, device=device)


def batched_gather(
    items: Sequence[GatherItem], group: Group, to: int | None = None
) -> Iterator[Tensor | None]:
    """Yield each gathered item in order, as a 1-D tensor with its own memory.

    All ranks of the group call it with the same items, and iterate over all of them.

    to: index in the group of the rank that gets them; the others get None. Default: all ranks.

    Raises:
        CommError: `to` is not an index in the group.
    """
    if to is not None and not 0 <= to < group.size():
        raise CommError(
            f"to={to} is not an index in a group of {group.size()} ranks; use an index from 0 to "
            f"{group.size() - 1}"
        )
    for batch in _batches(items):
        yield from _gather(batch, group, to)


def _batches(items: Sequence[GatherItem]) -> Iterator[list[GatherItem]]:
    """Yield items of one dtype and device in batches of at most BATCH_BYTES."""
    batch: list[GatherItem] = []
    num_bytes = 0
    for item in items:
        is_same_kind = batch and (item.dtype, item.device) == (batch[0].dtype, batch[0].device)
        if batch and (not is_same_kind or num_bytes + item.num_bytes > BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += item.num_bytes
    if batch:
        yield batch


def _gather(batch: Sequence[GatherItem], group: Group, to: int | None) -> Iterator[Tensor | None]:
    """Gather one batch, in a buffer ordered by rank, and then by item."""
    own_index, bounds = group.rank(), [0]
    for index in range(group.size()):
        bounds.append(bounds[-1] + sum(item.length(index) for item in batch))
    receives = to is None or to == own_index
    start, stop = (
        (bounds[own_index], bounds[own_index + 1])
        if receives
        else (0, bounds[own_index + 1] - bounds[own_index])
    )
    length = bounds[-1] if receives else stop
    flat = torch.empty(length, dtype=batch[0].dtype, device=batch[0].device)
    own_pieces = [item.own_shard for item in batch if item.own_shard is not None]
    position = start
    for piece in own_pieces:
        flat[position : position + piece.numel()].copy_(piece)
        position += piece.numel()
    if to is None:
        # the pieces are cut out of `flat` next, so all must have arrived
        start_all_gather_v(flat, bounds, group).wait()
    elif group.size() > 1:
        _collect(flat, bounds, group, to)
    if not receives:
        yield from (None for _ in batch)
    elif len(batch) == 1:
        yield flat
    else:
        yield from _unpack(batch, flat, bounds)


def _collect(flat: Tensor, bounds: Sequence[int], group: Group, to: int) -> None:
    """Send `flat` to rank `to` of the group, which receives all of them into its own."""
    post, ranks, buffer = Post(group), ranks_of(group), flat.view(torch.uint8)
    if group.rank() != to:
        post.send([buffer], ranks[to])
    else:
        for index, rank in enumerate(ranks):
            if index != to:
                size = flat.element_size()
                post.receive([buffer[bounds[index] * size : bounds[index + 1] * size]], rank)
    # the received pieces are unpacked next, and a sender frees its memory
    post.go().wait()


def _unpack(batch: Sequence[GatherItem], flat: Tensor, bounds: Sequence[int]) -> Iterator[Tensor]:
    """Yield the items of a gathered batch, each joined from its pieces."""
    starts = list(bounds[:-1])
    for item in batch:
        pieces: list[Tensor] = []
        for index, start in enumerate(starts):
            pieces.append(flat[start : start + item.length(index)])
            starts[index] += item.length(index)
        yield torch.cat(pieces)
