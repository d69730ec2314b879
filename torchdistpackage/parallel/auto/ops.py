"""What is done with an input or output of a split module, as a text and as a function.

A plan has full or partial gradients. Either way a text does one thing in the forward:

text           forward                                   partial: backward     full: backward
"copy"         none                                      none                  sum over the shards
"sum"          sum over the shards                       sum                   none
"gather d"     parts joined along dim d (default -1)     sum, then my part     my part
"split d"      my part along dim d                       as of a slice         parts joined
"scale"        divided by the number of shards           the same              the same
"scale_int"    divided by it, of an int                  none                  none

*Partial*: what shards have alike carries on each the part of the gradient that comes from what
that shard did with it. *Full*: it carries the gradient itself on each, so that what shards hold
alike needs nothing more; the plan then says "copy" where a shard goes on with its part of a layer.
Threads communicate in one graph, ranks in the backward too. None stays None.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.parallel.auto.actions import StateAction
from torchdistpackage.parallel.auto.rendezvous import (
    CollectiveBase,
    CollectiveOperation,
    ThreadGather,
    ThreadSum,
)
from torchdistpackage.parallel.auto.thread_maps import thread_map

TEXTS = ("copy", "sum", "gather", "split", "scale", "scale_int")


class SizedGather(str):
    """The text "gather d" that knows the lengths of the parts, which then are not exchanged."""

    sizes: tuple[int, ...]

    def __new__(cls, dim: int, sizes: tuple[int, ...]) -> "SizedGather":
        text = super().__new__(cls, f"gather {dim}")
        text.sizes = sizes
        return text

    def __getnewargs__(self) -> tuple[int, tuple[int, ...]]:  # by which it is copied
        return int(self.split()[1]), self.sizes


class DistributedAllReduce(CollectiveBase):
    """The sum over ranks, with that of their gradients. group: default tpc's tensor group."""

    kind = "sum"

    def __init__(self, world_size: int, group: Group | str = "tensor"):
        self.world_size, self.group = world_size, group

    def __call__(self, x: Tensor, rank: int) -> Tensor:
        return collectives.copy(collectives.reduce(x, self.group), self.group)


class DistributedAllGather(CollectiveBase):
    """The ranks' parts joined along `dim`. sizes: their lengths, which otherwise are exchanged."""

    kind = "gather"

    def __init__(
        self,
        world_size: int,
        dim: int,
        group: Group | str = "tensor",
        sizes: tuple[int, ...] | None = None,
    ):
        self.world_size, self.dim, self.group, self.sizes = world_size, dim, group, sizes

    def __call__(self, x: Tensor, rank: int) -> Tensor:
        return collectives.all_gather(x, self.dim, self.group, self.lengths(x))

    def lengths(self, x: Tensor) -> tuple[int, ...]:
        return self.sizes or collectives.exchange_sizes(x, self.dim, self.group)


class RankJoin(DistributedAllGather):
    """The same where every rank has the full gradient of what is joined."""

    def __call__(self, x: Tensor, rank: int) -> Tensor:
        return collectives.gather(x, self.dim, self.group, self.lengths(x))


@dataclass(frozen=True)
class RankMap(CollectiveBase):
    """A differentiable collective with full gradients: "copy", "sum" or "split"."""

    kind: str
    group: Group
    dim: int = 0

    def __call__(self, x: Tensor, rank: int) -> Tensor:
        if self.kind == "copy":
            return collectives.copy(x, self.group)
        if self.kind == "sum":
            return collectives.reduce(x, self.group)
        sizes = even_sizes(x.shape[self.dim], self.group.size())
        return collectives.scatter(x, self.dim, self.group, sizes)


@dataclass(frozen=True)
class CopyThenCut(CollectiveBase):
    """My part, by an action, of an input whose gradient is summed."""

    kind = "split"
    copy: CollectiveBase
    cut: StateAction

    def __call__(self, x: Tensor, rank: int) -> Tensor:
        return self.cut(self.copy(x, rank=rank), rank=rank)


def bind(
    rules: Mapping[Any, dict[Any, Any]],
    world_size: int,
    group: Group | None,
    full_gradients: bool,
) -> dict[Any, dict[Any, Any]]:
    """Rules whose texts of collectives are functions over threads, or over the ranks of a group.

    Raises:
        LayoutError: a function that joins threads is to join ranks.
    """
    make = _full if full_gradients else _partial
    return {
        pattern: {key: _bound(action, world_size, group, make) for key, action in actions.items()}
        for pattern, actions in rules.items()
    }


def _bound(action: Any, world_size: int, group: Group | None, make: Any) -> Any:
    if isinstance(action, tuple):
        action = action[0]
    if isinstance(action, CollectiveOperation) and group is not None:
        raise LayoutError(
            "a CollectiveOperation joins threads of one process, but each shard is a process "
            'here; use "sum" or "gather", or a function that calls torchdistpackage.comm'
        )
    if isinstance(action, StateAction):
        copy = make("copy", [], "copy", world_size, group)
        return CopyThenCut(copy, action) if isinstance(copy, CollectiveBase) else action
    if not isinstance(action, str):
        return action
    kind, *options = action.split()
    return make(kind, options, action, world_size, group)


def _partial(kind: str, options: list[str], text: str, num: int, group: Group | None) -> Any:
    if kind == "sum":
        return ThreadSum(num) if group is None else DistributedAllReduce(num, group)
    if kind == "gather":
        dim = int(options[0]) if options else -1
        if group is None:
            return ThreadGather(num, dim=dim)
        return DistributedAllGather(num, dim, group, getattr(text, "sizes", None))
    return text


def _full(kind: str, options: list[str], text: str, num: int, group: Group | None) -> Any:
    if kind not in ("copy", "sum", "gather", "split"):
        return text
    dim = int(options[0]) if options else -1
    if group is None:
        return thread_map(kind, num, dim)
    if kind == "gather":
        return RankJoin(num, dim, group, getattr(text, "sizes", None))
    return RankMap(kind, group, dim)


def is_copy(action: Any) -> bool:
    """Whether an action, whose collectives are bound, leaves the value as it is in the forward."""
    return action == "copy" or (isinstance(action, CollectiveBase) and action.kind == "copy")


def apply_action(value: Any, action: Any, *, rank: int, world_size: int) -> Any:
    """What `action`, whose collectives are bound, makes of an input or output of a shard."""
    if isinstance(action, tuple):
        action = action[0]
    if callable(action):
        skip = value is None and isinstance(action, (CollectiveBase, StateAction))
        return (
            None if skip and type(action) is not CollectiveOperation else action(value, rank=rank)
        )
    kind, *options = action.split()
    if value is None or kind == "copy":
        return value
    if kind == "split":
        return torch.tensor_split(value, world_size, dim=int(options[0]))[rank]
    if kind == "scale":
        return value / world_size
    if kind == "scale_int":
        return scaled_int(value, world_size)
    raise LayoutError(f"{action!r} is no action on a value; use {', '.join(TEXTS)}")


def scaled_int(value: Any, world_size: int) -> Any:
    remainder = value % world_size
    if remainder if not isinstance(value, Tensor) else bool(remainder.any()):
        raise LayoutError(f"scale_int of {value!r}, which is no multiple of {world_size} shards")
    return value // world_size
