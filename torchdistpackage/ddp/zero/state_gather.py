"""The state of parameters, gathered from the ranks that own pieces of them.

Before anything travels every rank learns from the owners which entries there are, of which shapes
and dtypes (`exchange_schema`); numbers come with that. Then pieces travel together, a batch at a
time (`batched_gather`), and a rank that gets nothing never holds more than what it sends.
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
"""Bytes of whole tensors in a batch, which a gather needs beside its result; a larger one travels
alone."""

_PLAIN = (bool, int, float, complex, str, type(None))
"""Values that can be keys of a dict, so that equal forms become one."""

State = dict[Hashable, object]
"""State of one parameter: key -> tensor, number, or whatever the optimizer keeps."""


@dataclass(frozen=True)
class StateEntry:
    """One entry of a parameter's state: what every rank must know to make it.

    shape: of a tensor that its owner has in one; None where it is the parameter's, cut or not.
    value: itself, if no tensor travels: numbers and all that is not a tensor. on_cpu: whatever the
    parameter's device.
    """

    key: Hashable
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None
    on_cpu: bool = False
    value: object = None


StateEntries = tuple[StateEntry, ...]


@dataclass(frozen=True)
class GatherItem:
    """A flat tensor of which rank i of the group has elements bounds[i] to bounds[i + 1].

    mine: my elements, 1-D on any device; None where there are none. device: where it travels.
    """

    bounds: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    mine: Tensor | None

    @property
    def num_bytes(self) -> int:
        return self.bounds[-1] * self.dtype.itemsize

    def length(self, index: int) -> int:
        return self.bounds[index + 1] - self.bounds[index]


def gather_states(
    mine: Sequence[tuple[ParamPartition, State]], *, to: int | None = None, cpu: bool = False
) -> dict[Hashable, State]:
    """The gathered state of each parameter, by its place in `mine`, this rank's part of it.

    to: index, in each group that shares, of the rank that gets the state, default all. cpu: put
    tensors there; else they are on the parameter's device, or on the CPU if offloaded.

    All ranks call it. It needs memory for the result and one batch.

    Raises:
        CheckpointError: ranks hold different kinds of state for one parameter.
        CommError: `to` is no index in a group.
    """
    states: dict[Hashable, State] = {i: {} for i in range(len(mine))}
    number = {id(partition): i for i, (partition, _) in enumerate(mine)}
    for group, some in for_each_group(partition for partition, _ in mine if partition.bounds[-1]):
        receives, members = to is None or group.rank() == to, [number[id(p)] for p in some]
        forms = exchange_schema(group, {i: mine[i] for i in members})
        waiting: list[tuple[int, StateEntry]] = []
        items: list[GatherItem] = []
        for i in members:
            partition, state = mine[i]
            for form in forms[i]:
                if form.dtype is not None and form.value is None:
                    waiting.append((i, form))
                    items.append(item_of(partition, form, state))
                if receives:
                    states[i][form.key] = made_of(form, partition)  # keeps the place of a key
        for (i, form), flat in zip(waiting, batched_gather(items, group, to), strict=True):
            if flat is not None:
                flat = flat.cpu() if cpu or form.on_cpu else flat
                partition = mine[i][0]
                states[i][form.key] = (
                    partition.shaped(flat) if form.shape is None else flat.view(form.shape)
                )
    return states


def exchange_schema(
    group: Group, mine: Mapping[int, tuple[ParamPartition, State]]
) -> dict[int, StateEntries]:
    """The pieces that the owners of each parameter have of it."""
    known: dict[StateEntries, StateEntries] = {}  # equal ones travel once
    forms: list[StateEntries | None] = []
    for partition, state in mine.values():
        own = tuple(entry_of(partition, key, value) for key, value in state.items())
        if all(isinstance(form.value, _PLAIN) for form in own):
            own = known.setdefault(own, own)
        forms.append(None if partition.mine is None else own)
    of_ranks = gather_objects(forms, group)
    result: dict[int, StateEntries] = {}
    for i, of_one in zip(mine, zip(*of_ranks, strict=True), strict=True):
        owned = [one for one in of_one if one is not None]
        layouts = {tuple((f.key, f.dtype, f.shape) for f in one) for one in owned}
        if len(layouts) > 1:
            raise CheckpointError(
                f"ranks {ranks_of(group)} have different state for {mine[i][0].name}: "
                f"{' and '.join(sorted(map(str, layouts)))}; step them together, or let one rank "
                f"own whole parameters (whole=True)"
            )
        result[i] = owned[0]
    return result


def entry_of(partition: ParamPartition, key: Hashable, value: object) -> StateEntry:
    if not isinstance(value, Tensor):
        return StateEntry(key, value=value)
    on_cpu = value.device.type == "cpu"
    if value.dim() == 0 and not (partition.whole and partition.spec.parameter.dim() == 0):
        return StateEntry(key, value.dtype, (), on_cpu, value.item())
    if partition.mine is not None and value.shape == partition.mine.shape:
        return StateEntry(key, value.dtype, None, on_cpu)
    return StateEntry(key, value.dtype, tuple(value.shape), on_cpu)


def item_of(partition: ParamPartition, form: StateEntry, state: State) -> GatherItem:
    assert form.dtype is not None
    spec = partition.spec
    value = state.get(form.key)
    mine = value if isinstance(value, Tensor) else None
    bounds = partition.bounds
    if form.shape is not None:  # from the first owner, in one
        owner = next(r for r in range(spec.group.size()) if bounds[r] < bounds[r + 1])
        size = torch.Size(form.shape).numel()
        bounds = tuple(0 if r <= owner else size for r in range(len(bounds)))
        mine = mine.reshape(-1) if mine is not None and spec.group.rank() == owner else None
    elif partition.whole and mine is not None:
        mine = partition.flat(mine)
    return GatherItem(bounds, form.dtype, spec.parameter.device, mine)


def made_of(form: StateEntry, partition: ParamPartition) -> object:
    """A value that did not travel as a tensor."""
    if form.dtype is None or form.value is None:
        return form.value
    device = torch.device("cpu") if form.on_cpu else partition.spec.parameter.device
    return torch.tensor(form.value, dtype=form.dtype, device=device)


def batched_gather(
    items: Sequence[GatherItem], group: Group, to: int | None = None
) -> Iterator[Tensor | None]:
    """Yield each item whole, 1-D in memory of its own, in order.

    to: index in the group of the rank that gets them; the others get None. Default: all do.
    All ranks of the group call it with the same items, and take all of them.

    Raises:
        CommError: `to` is no index in the group.
    """
    if to is not None and not 0 <= to < group.size():
        raise CommError(
            f"to={to} is no rank of a group of {group.size()}, whose ranks are 0 to "
            f"{group.size() - 1} here, by their place; give one of these"
        )
    for batch in _batches(items):
        yield from _gather(batch, group, to)


def _batches(items: Sequence[GatherItem]) -> Iterator[list[GatherItem]]:
    batch: list[GatherItem] = []
    num_bytes = 0
    for item in items:
        alike = batch and (item.dtype, item.device) == (batch[0].dtype, batch[0].device)
        if batch and (not alike or num_bytes + item.num_bytes > BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += item.num_bytes
    if batch:
        yield batch


def _gather(batch: Sequence[GatherItem], group: Group, to: int | None) -> Iterator[Tensor | None]:
    """The batch lies rank after rank, and for each rank item after item."""
    me, bounds = group.rank(), [0]
    for index in range(group.size()):
        bounds.append(bounds[-1] + sum(item.length(index) for item in batch))
    receives = to is None or to == me
    start, stop = (bounds[me], bounds[me + 1]) if receives else (0, bounds[me + 1] - bounds[me])
    length = bounds[-1] if receives else stop
    flat = torch.empty(length, dtype=batch[0].dtype, device=batch[0].device)
    mine = [item.mine for item in batch if item.mine is not None]
    at = start
    for piece in mine:
        flat[at : at + piece.numel()].copy_(piece)
        at += piece.numel()
    if to is None:
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
    """Fill `flat` on rank `to` of the group; on the others it is what they send."""
    post, ranks, buffer = Post(group), ranks_of(group), flat.view(torch.uint8)
    if group.rank() != to:
        post.send([buffer], ranks[to])
    else:
        for index, rank in enumerate(ranks):
            if index != to:
                size = flat.element_size()
                post.receive([buffer[bounds[index] * size : bounds[index + 1] * size]], rank)
    post.go().wait()


def _unpack(batch: Sequence[GatherItem], flat: Tensor, bounds: Sequence[int]) -> Iterator[Tensor]:
    at = list(bounds[:-1])
    for item in batch:
        pieces: list[Tensor] = []
        for index, start in enumerate(at):
            pieces.append(flat[start : start + item.length(index)])
            at[index] += item.length(index)
        yield torch.cat(pieces)
