"""The interface of a sharded optimizer for clipping, scaling, pipelines, checkpoints and training.

None of these knows the optimizer's class: they use a `ShardedOptimizer`, and `owners_of` finds the
one that has a parameter.
"""

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.layout.layout import Layout


@dataclass(frozen=True, eq=False)
class ParamShard:
    """Elements [start, stop) of one parameter in memory order, owned by this rank.

    tensor: the tensor that the inner optimizer updates: 1-D, or in the parameter's shape if
        `whole`, when one rank owns all of it. Its `.grad` is set once the sum has arrived.
    member: number of the parameter in its bucket.
    offset: position of the elements in this rank's slice of the bucket.
    """

    tensor: nn.Parameter
    spec: ParamSpec
    member: int
    start: int
    stop: int
    offset: int
    layout: Layout | None
    whole: bool

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def parameter(self) -> nn.Parameter:
        return self.spec.parameter

    @property
    def group(self) -> Group:
        return self.spec.group

    def view(self, slice_: Tensor) -> Tensor:
        """Return this shard's elements of a tensor that is laid out like this rank's slice."""
        if self.whole:
            return self.spec.view(slice_, slice_.storage_offset() + self.offset)
        return slice_.narrow(0, self.offset, self.stop - self.start)


@dataclass(frozen=True)
class ParamPartition:
    """A parameter, the elements that each rank owns, and the tensor that the inner optimizer has.

    bounds: rank i of `spec.group` owns elements bounds[i] to bounds[i + 1] of the parameter
        flattened in memory order; all zero if it is frozen.
    own_tensor: the inner optimizer's tensor, as `ParamShard.tensor`; None: this rank owns nothing.
    master: `own_tensor` is a copy in another dtype, not memory of the parameter.

    Nothing here reads an element of the parameter, which may not be gathered.
    """

    spec: ParamSpec
    bounds: tuple[int, ...]
    own_tensor: nn.Parameter | None
    whole: bool = False
    master: bool = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def group(self) -> Group:
        return self.spec.group

    @property
    def range(self) -> tuple[int, int]:
        """The elements [start, stop) that this rank owns."""
        index = self.group.rank()
        return self.bounds[index], self.bounds[index + 1]

    def flat(self, value: Tensor) -> Tensor:
        """Return the elements that this rank owns."""
        strides = self.spec.parameter.stride()
        if value.stride() != strides:
            buffer = torch.empty_strided(
                value.shape, strides, dtype=value.dtype, device=value.device
            )
            value = buffer.copy_(value)
        return value.as_strided((value.numel(),), (1,), value.storage_offset())

    def shaped(self, flat: Tensor) -> Tensor:
        """Return a flat tensor in the parameter's shape, the inverse of `flat`."""
        parameter = self.spec.parameter
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


@runtime_checkable
class ShardedOptimizer(Protocol):
    """An optimizer that keeps a shard of each parameter on every rank, such as ZeroOptimizer.

    state: state of the tensors that the inner optimizer updates.
    shards: the shards that this rank owns.
    partitions: the parameters of each param group, with the elements that each rank owns.
    reducer: sums the gradients.
    """

    state: Any
    shards: Sequence[ParamShard]
    partitions: Sequence[Sequence[ParamPartition]]
    reducer: Reducer

    def finish(self) -> None:
        """Wait until parameters are full and current."""

    def arrive(self) -> None:
        """Wait for gathers in flight, without starting others."""

    def gather_shards(self) -> None:
        """Gather parameters anew, after the caller wrote to the shards; all ranks call it."""


OWNERS: WeakSet[ShardedOptimizer] = WeakSet()
"""Optimizers that own parameters."""


def owners_of(parameters: Iterable[Tensor]) -> list[ShardedOptimizer]:
    """Return the living optimizers that own some of these parameters, in the parameters' order."""
    parameters = list(parameters) if OWNERS else []
    owners = _owners(parameters)
    if owners and any(p.grad is not None for p in parameters):
        del owners
        gc.collect()  # a dropped optimizer may be alive only until the next collection
        owners = _owners(parameters)
    return owners


def _owners(parameters: Sequence[Tensor]) -> list[ShardedOptimizer]:
    by_id = {
        id(member.spec.parameter): x
        for x in OWNERS
        for members in x.partitions
        for member in members
    }
    owners = {
        id(x): x for p in parameters if p.requires_grad and (x := by_id.get(id(p))) is not None
    }
    return list(owners.values())
