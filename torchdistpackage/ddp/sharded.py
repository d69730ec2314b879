"""What an optimizer that shards shows to clipping, scaling, pipelines, checkpoints and training.

None of these knows which optimizer it is: they ask a `ShardedOptimizer`, and `owners_of` finds the
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
    """Elements [start, stop) of one parameter in memory order: those that this rank owns.

    tensor: what the inner optimizer steps, 1-D, or of the parameter's shape where `whole`: one rank
        owns all of it; its `.grad` is set once the sum is here.
    member: number of the parameter in its bucket. offset: of the elements in my slice of it.
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
        """My elements in a tensor that is laid out like my slice."""
        if self.whole:
            return self.spec.view(slice_, slice_.storage_offset() + self.offset)
        return slice_.narrow(0, self.offset, self.stop - self.start)


@dataclass(frozen=True)
class ParamPartition:
    """A parameter, which rank owns which elements, and what the inner optimizer holds instead.

    bounds: rank i of `spec.group` owns elements bounds[i] to bounds[i + 1] of the parameter
        flattened in memory order; all zero where frozen.
    mine: the inner optimizer's own, as `ParamShard.tensor`; None where nothing is owned here.
    master: `mine` is a copy in another dtype and not memory of the parameter.

    Nothing here reads an element of the parameter, which may not be gathered.
    """

    spec: ParamSpec
    bounds: tuple[int, ...]
    mine: nn.Parameter | None
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
        """My elements."""
        index = self.group.rank()
        return self.bounds[index], self.bounds[index + 1]

    def flat(self, value: Tensor) -> Tensor:
        """A tensor of the parameter's shape as one dim, in the parameter's memory order."""
        strides = self.spec.parameter.stride()
        if value.stride() != strides:
            buffer = torch.empty_strided(
                value.shape, strides, dtype=value.dtype, device=value.device
            )
            value = buffer.copy_(value)
        return value.as_strided((value.numel(),), (1,), value.storage_offset())

    def shaped(self, flat: Tensor) -> Tensor:
        """The reverse of `flat`."""
        parameter = self.spec.parameter
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


@runtime_checkable
class ShardedOptimizer(Protocol):
    """An optimizer that keeps a part of each parameter here: ZeroOptimizer.

    state: of what the inner optimizer steps. shards: what this rank owns, a piece of a parameter
    each. partitions: for each param group its parameters; `bounds` of each say who has which
    elements, all zero where it is frozen. reducer: sums the gradients.
    """

    state: Any
    shards: Sequence[ParamShard]
    partitions: Sequence[Sequence[ParamPartition]]
    reducer: Reducer

    def finish(self) -> None:
        """Wait until parameters are full and current."""

    def arrive(self) -> None:
        """Wait until no parameter is on its way."""


OWNERS: WeakSet[ShardedOptimizer] = WeakSet()
"""Optimizers that own parameters."""


def owners_of(parameters: Iterable[Tensor]) -> list[ShardedOptimizer]:
    """Optimizers in use to which some of these parameters belong, in their order."""
    given = list(parameters) if OWNERS else []
    found = _owners(given)
    if found and any(p.grad is not None for p in given):
        del found
        gc.collect()  # one that was dropped may only wait for this
        found = _owners(given)
    return found


def _owners(parameters: Sequence[Tensor]) -> list[ShardedOptimizer]:
    of = {id(h.spec.parameter): x for x in OWNERS for members in x.partitions for h in members}
    found = {id(x): x for p in parameters if p.requires_grad and (x := of.get(id(p))) is not None}
    return list(found.values())
