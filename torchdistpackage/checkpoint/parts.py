"""The tensors that a rank holds, as parts in global coordinates, full or sharded by ZeRO.

A part is a box of a global tensor with the elements in it, as a view of the run's own memory.
Writers copy out of the views, and readers copy into them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.ddp.wrapper_state import unwrap_model
from torchdistpackage.ddp.zero.state_dict import MASTER
from torchdistpackage.errors import CheckpointError, LayoutError
from torchdistpackage.layout.derive import Box, blocks, local_shape, owner, owns, parts
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import collect, mark_of
from torchdistpackage.topology.mesh import Topology

# Every save asks about every tensor again while training waits; a cached answer takes a few
# hundred bytes.
_blocks, _owns, _owner, _parts = (lru_cache(1 << 14)(f) for f in (blocks, owns, owner, parts))

Params = Mapping[str, tuple[Tensor, Layout]]
"""Local name -> (parameter or buffer, its layout). In the checkpoint its name is `layout.name`."""


def params_of(params: Params | nn.Module, topology: Topology, rank: int) -> Params:
    """Return `params`, or all parameters of a module, wrapped or not, with their layouts.

    In a pipeline, a parameter whose layout names no stage gets the number of its stage as a prefix.

    Raises:
        LayoutError: a parameter does not have the shape of its layout on this rank.
    """
    if not isinstance(params, nn.Module):
        return params
    module = unwrap_model(params)
    layouts = collect(module)
    result: dict[str, tuple[Tensor, Layout]] = {}
    for name, parameter in module.named_parameters():
        mark = mark_of(parameter)
        layout = mark.layout if mark is not None and mark.is_told else layouts[name]
        mesh = topology.view(layout.view)
        if mesh.axis_size("pipe") > 1 and not layout.stages:
            stage = mesh.coord(rank)["pipe"]
            layout = layout.named(f"{stage}.{layout.name}").on(stage)
        if tuple(parameter.shape) != (shape := local_shape(layout, mesh, rank)):
            raise LayoutError(
                f"{name} has shape {tuple(parameter.shape)} on rank {rank}, but its layout, "
                f"{layout.shape} split {layout.split}, gives it {shape} on these axes; save under "
                f"a topology with the axis that cuts it"
            )
        result[name] = parameter, layout
    return result


class OptimizerShard(Protocol):
    """Elements [start, stop) of `parameter` in memory order, as a sharded optimizer holds them.

    tensor: the tensor that it updates: 1-D, or in the parameter's shape if the shard is all of it.
    """

    tensor: Tensor
    parameter: Tensor
    start: int
    stop: int
    group: Group


Parts = tuple[tuple[Box, Tensor], ...]
"""Boxes of a global tensor, each with the elements in it."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedTensor:
    """One tensor of a checkpoint: the parts that this rank holds, and those that it owns.

    owned: the parts that this rank writes; None if other ranks write all of them.
    is_frozen: no optimizer updates it. is_buffer: a forward may change it, not only an optimizer.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Parts
    owned: Parts | None
    is_frozen: bool = False
    is_buffer: bool = False


class TopologyRank:
    """One rank of a topology, which turns tensors and layouts into parts of a checkpoint."""

    def __init__(self, topology: Topology, rank: int):
        self.topology, self.rank = topology, rank

    def whole(self, layout: Layout, tensor: Tensor) -> SavedTensor:
        """Return all of the rank's shard; `tensor` has its shape."""
        mesh = self.topology.view(layout.view)

        detached = tensor.detach()

        def boxed_views(once: bool) -> Parts:
            boxes = _blocks(layout, mesh, self.rank, once)
            return tuple((where, detached[local]) for where, local in boxes)

        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        all_parts = owned = boxed_views(once=False)
        if not _owns(layout, mesh, self.rank):
            owned = None
        elif layout.ranges:  # only with ranges may a rank hold an element twice
            owned = boxed_views(once=True)
        return SavedTensor(layout.name, layout.shape, tensor.dtype, all_parts, owned, frozen)

    def sliced(self, layout: Layout, shard: OptimizerShard, tensor: Tensor) -> SavedTensor:
        """Return the elements of a shard; `tensor` is the shard's, or optimizer state for it.

        If several groups hold the same elements, the group with the full tensor's owner writes
        them.
        """
        mesh = self.topology.view(layout.view)
        order = _memory_order(shard.parameter)
        inverse_order = sorted(range(len(order)), key=order.__getitem__)
        flat = tensor.detach()
        flat = flat.permute(_memory_order(flat)).view(-1)

        def boxed_views(once: bool) -> Iterator[tuple[Box, Tensor]]:
            for part in _parts(layout, mesh, self.rank, shard.start, shard.stop, order, once):
                offset = part.run.start - shard.start
                run = flat[offset : offset + math.prod(part.run.lengths)].view(part.run.lengths)
                yield part.where, run[part.inside].permute(inverse_order)

        all_parts = owned = tuple(boxed_views(once=False))
        if not self.is_owner(layout, shard):
            owned = None
        elif layout.ranges:
            owned = tuple(boxed_views(once=True))
        return SavedTensor(layout.name, layout.shape, tensor.dtype, all_parts, owned)

    def kept(self, layout: Layout, shard: OptimizerShard | None, tensor: Tensor) -> SavedTensor:
        """Return state that exists once for a parameter, such as its step or its row means.

        The owner of the parameter's first element writes it.
        """
        shape = tuple(tensor.shape)
        state_layout = Layout(layout.name, shape, view=layout.view, stages=layout.stages)
        if shard is None:
            return self.whole(state_layout, tensor)
        full_part = ((tuple(slice(0, n) for n in shape), tensor.detach()),)
        is_writer = shard.start == 0 and self.is_owner(state_layout, shard)
        return SavedTensor(
            layout.name, shape, tensor.dtype, full_part, full_part if is_writer else None
        )

    def part(self, layout: Layout, shard: OptimizerShard | None, tensor: Tensor) -> SavedTensor:
        """Return the tensor of a shard as `sliced` does; without a shard as `whole` does."""
        if shard is None:
            return self.whole(layout, tensor)
        return self.sliced(layout, shard, tensor)

    def is_owner(self, layout: Layout, shard: OptimizerShard) -> bool:
        """Return whether this rank writes the elements of a shard, among all ranks and stages."""
        mesh = self.topology.view(layout.view)
        return _owner(layout, mesh, self.rank) in ranks_of(shard.group)


def _memory_order(x: Tensor) -> tuple[int, ...]:
    """Return the dims from the slowest varying in memory to the fastest."""
    return tuple(sorted(range(x.dim()), key=lambda dim: -x.stride(dim)))


def saved_tensors(
    params: Params, topology_rank: TopologyRank, optimizer: torch.optim.Optimizer | None
) -> Iterator[SavedTensor]:
    """Yield every tensor to save: the parameters and their optimizer state.

    If several parameters share a name, as tied ones do, it yields the first.

    Raises:
        CheckpointError: the optimizer has state that cannot be placed in the global tensor.
    """
    by_name: dict[str, tuple[Tensor, Layout]] = {}
    for param, layout in params.values():
        by_name.setdefault(layout.name, (param, layout))
    layouts = dict(by_name.values())
    from_shards: set[Tensor] = set()  # parameters that shards hold, on any rank
    if isinstance(optimizer, ShardedOptimizer):
        members = (m for group in optimizer.partitions for m in group if any(m.bounds))
        from_shards = {m.spec.parameter for m in members}
    for p, layout in by_name.values():
        if p not in from_shards:
            yield replace(topology_rank.whole(layout, p), is_buffer=not isinstance(p, nn.Parameter))
    if isinstance(optimizer, ShardedOptimizer):
        for shard in optimizer.shards:
            layout = layouts.get(shard.parameter)
            if layout is None:
                continue
            yield topology_rank.sliced(layout, shard, shard.tensor.to(shard.parameter.dtype))
            if has_master(shard):
                yield topology_rank.sliced(
                    layout.named(f"{layout.name}#{MASTER}"), shard, shard.tensor
                )
            yield from _state(optimizer, shard.tensor, shard, layout, topology_rank)
    elif optimizer is not None:
        for param, layout in by_name.values():
            yield from _state(optimizer, param, None, layout, topology_rank)


def has_master(shard: OptimizerShard) -> bool:
    """Return whether the shard is a wide copy, more precise than the parameter."""
    return shard.tensor.dtype != shard.parameter.dtype


def _state(
    optimizer: Any,
    param: Tensor,
    shard: OptimizerShard | None,
    layout: Layout,
    topology_rank: TopologyRank,
) -> Iterator[SavedTensor]:
    """Yield everything that the optimizer keeps for one of its tensors."""
    for key, value in optimizer.state.get(param, {}).items():
        if value is None:
            continue
        name = f"{layout.name}#{key}"
        tensor = value if isinstance(value, Tensor) else torch.tensor(value)
        is_part = tensor.ndim > 0 and tensor.shape == param.shape
        if tensor.ndim and not is_part and not is_whole(layout, param):
            raise CheckpointError(
                f"optimizer state {name} has shape {tuple(tensor.shape)}, but its parameter has "
                f"shape {tuple(param.shape)} and is split over ranks; use an optimizer whose state "
                "has the parameter's shape or is scalar"
            )
        yield (topology_rank.part if is_part else topology_rank.kept)(
            layout.named(name), shard, tensor
        )


def is_whole(layout: Layout, tensor: Tensor) -> bool:
    """Return whether the optimizer updates the full parameter at once, in its own shape."""
    return tuple(tensor.shape) == layout.shape
