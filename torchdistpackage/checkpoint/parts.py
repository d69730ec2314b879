"""What a rank holds of a run's tensors, as parts in global coordinates, full or sharded by ZeRO.

A part is a box of a global tensor and the elements that lie there, as a view of memory that the run
uses: a writer copies out of the views, a reader into them.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

# every save asks anew for every tensor while training waits; an answer has some hundred bytes
_blocks, _owns, _owner, _parts = (lru_cache(1 << 14)(f) for f in (blocks, owns, owner, parts))

Params = Mapping[str, tuple[Tensor, Layout]]
"""Local name -> (parameter or buffer, its layout); the checkpoint knows it as `layout.name`."""


def params_of(params: Params | nn.Module, topology: Topology, rank: int) -> Params:
    """`params`, or all parameters of a module, wrapped or not, cut as they say themselves.

    Those that belong to no stage are named after the stage that holds them, where there are some.

    Raises:
        LayoutError: a parameter is no part that the topology has; names it.
    """
    if not isinstance(params, nn.Module):
        return params
    module = unwrap_model(params)
    own, found = collect(module), dict[str, tuple[Tensor, Layout]]()
    for name, parameter in module.named_parameters():
        mark = mark_of(parameter)
        layout = mark.layout if mark is not None and mark.is_told else own[name]
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
        found[name] = parameter, layout
    return found


class OptimizerShard(Protocol):
    """Elements [start, stop) of `parameter` in memory order, as an optimizer that shards has them.

    tensor: what it updates here: 1-D, or of the parameter's shape if it is all of it.
    """

    tensor: Tensor
    parameter: Tensor
    start: int
    stop: int
    group: Group


Parts = tuple[tuple[Box, Tensor], ...]
"""Boxes of a global tensor, and the elements that lie there."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedTensor:
    """One tensor as far as this rank holds it: parts, and those for which it speaks.

    owned: None where another rank speaks for all of them. is_frozen: no optimizer updates it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Parts
    owned: Parts | None
    is_frozen: bool = False


class TopologyRank:
    """One rank of a topology: what follows from its layouts."""

    def __init__(self, topology: Topology, rank: int):
        self.topology, self.rank = topology, rank

    def whole(self, layout: Layout, tensor: Tensor) -> SavedTensor:
        """All of the rank's shard; `tensor` has its shape."""
        mesh = self.topology.view(layout.view)

        mine = tensor.detach()

        def found(once: bool) -> Parts:
            boxes = _blocks(layout, mesh, self.rank, once)
            return tuple((where, mine[local]) for where, local in boxes)

        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        held = owned = found(once=False)
        if not _owns(layout, mesh, self.rank):
            owned = None
        elif layout.ranges:  # else a rank holds nothing twice
            owned = found(once=True)
        return SavedTensor(layout.name, layout.shape, tensor.dtype, held, owned, frozen)

    def sliced(self, layout: Layout, shard: OptimizerShard, tensor: Tensor) -> SavedTensor:
        """The elements of a shard; `tensor` is its own, or the optimizer's state for it.

        Of groups that hold the same elements the one with the owner of the full tensor speaks.
        """
        mesh = self.topology.view(layout.view)
        order = _memory_order(shard.parameter)
        back = sorted(range(len(order)), key=order.__getitem__)
        flat = tensor.detach()
        flat = flat.permute(_memory_order(flat)).view(-1)

        def found(once: bool) -> Iterator[tuple[Box, Tensor]]:
            for part in _parts(layout, mesh, self.rank, shard.start, shard.stop, order, once):
                at = part.run.start - shard.start
                run = flat[at : at + math.prod(part.run.lengths)].view(part.run.lengths)
                yield part.where, run[part.inside].permute(back)

        held = owned = tuple(found(once=False))
        if not self.is_owner(layout, shard):
            owned = None
        elif layout.ranges:
            owned = tuple(found(once=True))
        return SavedTensor(layout.name, layout.shape, tensor.dtype, held, owned)

    def kept(self, layout: Layout, shard: OptimizerShard | None, tensor: Tensor) -> SavedTensor:
        """What is kept once for a parameter or a shard, such as its step, or the means of the rows
        of a parameter that is whole here; the owner of the parameter's first element speaks."""
        shape = tuple(tensor.shape)
        one = Layout(layout.name, shape, view=layout.view, stages=layout.stages)
        if shard is None:
            return self.whole(one, tensor)
        held = ((tuple(slice(0, n) for n in shape), tensor.detach()),)
        speaks = shard.start == 0 and self.is_owner(one, shard)
        return SavedTensor(layout.name, shape, tensor.dtype, held, held if speaks else None)

    def part(self, layout: Layout, shard: OptimizerShard | None, tensor: Tensor) -> SavedTensor:
        """`sliced`, or `whole` without a shard."""
        whole = shard is None
        return self.whole(layout, tensor) if whole else self.sliced(layout, shard, tensor)

    def is_owner(self, layout: Layout, shard: OptimizerShard) -> bool:
        """Whether this rank answers for the elements of a shard, over all ranks and stages."""
        mesh = self.topology.view(layout.view)
        return _owner(layout, mesh, self.rank) in ranks_of(shard.group)


def _memory_order(x: Tensor) -> tuple[int, ...]:
    """The dims from the slowest varying in memory to the fastest."""
    return tuple(sorted(range(x.dim()), key=lambda dim: -x.stride(dim)))


def held(
    params: Params, here: TopologyRank, optimizer: torch.optim.Optimizer | None
) -> Iterator[SavedTensor]:
    """Every tensor to save: parameters, and what the optimizer keeps for them.

    Of several that share a name, as tied ones do, the first.

    Raises:
        CheckpointError: the optimizer has state of a kind that has no place.
    """
    first: dict[str, tuple[Tensor, Layout]] = {}
    for param, layout in params.values():
        first.setdefault(layout.name, (param, layout))
    layouts = dict(first.values())
    from_shards: set[Tensor] = set()  # of which this rank may have none
    if isinstance(optimizer, ShardedOptimizer):
        members = (h for group in optimizer.partitions for h in group if any(h.bounds))
        from_shards = {h.spec.parameter for h in members}
    yield from (here.whole(x, p) for p, x in first.values() if p not in from_shards)
    if isinstance(optimizer, ShardedOptimizer):
        for shard in optimizer.shards:
            layout = layouts.get(shard.parameter)
            if layout is None:
                continue
            yield here.sliced(layout, shard, shard.tensor.to(shard.parameter.dtype))
            if has_master(shard):
                yield here.sliced(layout.named(f"{layout.name}#{MASTER}"), shard, shard.tensor)
            yield from _state(optimizer, shard.tensor, shard, layout, here)
    elif optimizer is not None:
        for param, layout in first.values():
            yield from _state(optimizer, param, None, layout, here)


def has_master(shard: OptimizerShard) -> bool:
    """Whether the shard is a wide copy, which says more than the parameter does."""
    return shard.tensor.dtype != shard.parameter.dtype


def _state(
    optimizer: Any, of: Tensor, shard: OptimizerShard | None, layout: Layout, here: TopologyRank
) -> Iterator[SavedTensor]:
    """All that the optimizer keeps for one of its tensors."""
    for key, value in optimizer.state.get(of, {}).items():
        if value is None:
            continue
        name = f"{layout.name}#{key}"
        tensor = value if isinstance(value, Tensor) else torch.tensor(value)
        is_part = tensor.ndim > 0 and tensor.shape == of.shape
        if tensor.ndim and not is_part and not is_whole(layout, of):
            raise CheckpointError(
                f"optimizer state {name} has shape {tuple(tensor.shape)}, its parameter "
                f"{tuple(of.shape)}, of which ranks hold parts; only state of that shape and "
                f"scalars can be saved then"
            )
        yield (here.part if is_part else here.kept)(layout.named(name), shard, tensor)


def is_whole(layout: Layout, of: Tensor) -> bool:
    """Whether the optimizer steps all of a parameter at once, in its own shape."""
    return tuple(of.shape) == layout.shape
