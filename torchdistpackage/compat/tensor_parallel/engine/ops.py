"""Operations on the inputs and outputs of a split module, as texts and as functions.

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
Who communicates is a `Collectives`: here the ranks of a group. None stays None.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.compat.tensor_parallel.engine.actions import StateAction
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.partition import even_sizes

TEXTS = ("copy", "sum", "gather", "split", "scale", "scale_int")
COMMUNICATING = {False: ("sum", "gather"), True: ("copy", "sum", "gather", "split")}
"""Texts that communicate in a forward or a backward, by whether a plan has full gradients."""


class CollectiveBase:
    """An action that all shards call together. kind: what it does, where that is counted.

    takes_none: whether it is called with None too. meets_threads: whether it joins threads of one
    process, which no group of ranks can do.
    """

    kind: str
    meets_threads = False

    def __call__(self, x: Any, rank: int) -> Any:
        raise NotImplementedError

    @property
    def takes_none(self) -> bool:
        return False

    def has_all(self) -> bool:
        """Return whether all shards are in a forward now, so that a call finds them."""
        raise NotImplementedError


class Collectives(Protocol):
    """The collectives that the texts of a plan name, for shards as threads or as processes."""

    def make(
        self, kind: str, dim: int, sizes: tuple[int, ...] | None, full_gradients: bool
    ) -> CollectiveBase:
        """Return the function of "copy", "sum", "gather dim" or "split dim".

        sizes: the lengths of gathered parts, if they are known.
        """
        ...

    def check(self, action: object) -> None:
        """Raises LayoutError where a function of the user's cannot be called here."""
        ...


_calling: ContextVar[bool] = ContextVar("tdp_rank_calls", default=False)


@contextmanager
def rank_calls() -> Iterator[None]:
    """Note that all ranks of the group compute the same forward inside."""
    token = _calling.set(True)
    try:
        yield
    finally:
        _calling.reset(token)


class RankCollective(CollectiveBase):
    """One that ranks call, in a forward or where a backward computes that again."""

    def has_all(self) -> bool:
        return _calling.get() or torch._C._current_graph_task_id() != -1


class SizedGather(str):
    """The text "gather d" that knows the lengths of the parts, which then are not exchanged."""

    sizes: tuple[int, ...]

    def __new__(cls, dim: int, sizes: tuple[int, ...]) -> "SizedGather":
        text = super().__new__(cls, f"gather {dim}")
        text.sizes = sizes
        return text

    def __getnewargs__(self) -> tuple[int, tuple[int, ...]]:  # by which it is copied
        return int(self.split()[1]), self.sizes


class DistributedAllReduce(RankCollective):
    """The sum over ranks, with that of their gradients. group: default tpc's tensor group."""

    kind = "sum"

    def __init__(self, world_size: int, group: Group | str = "tensor"):
        self.world_size, self.group = world_size, group

    def __call__(self, x: Tensor, rank: int) -> Tensor:
        return collectives.copy(collectives.reduce(x, self.group), self.group)


class DistributedAllGather(RankCollective):
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
class RankMap(RankCollective):
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


@dataclass(frozen=True)
class RankCollectives:
    """The `Collectives` of the ranks of a group, each of which holds one shard."""

    group: Group

    def make(
        self, kind: str, dim: int, sizes: tuple[int, ...] | None, full_gradients: bool
    ) -> CollectiveBase:
        if kind == "gather":
            join = RankJoin if full_gradients else DistributedAllGather
            return join(self.group.size(), dim, self.group, sizes)
        if full_gradients:
            return RankMap(kind, self.group, dim)
        return DistributedAllReduce(self.group.size(), self.group)

    def check(self, action: object) -> None:
        if isinstance(action, CollectiveBase) and action.meets_threads:
            raise LayoutError(
                "a CollectiveOperation joins threads of one process, but each shard is a process "
                'here; use "sum" or "gather", or a function that calls torchdistpackage.comm'
            )


def bind(
    rules: Mapping[Any, dict[Any, Any]], collectives: Collectives, full_gradients: bool
) -> dict[Any, dict[Any, Any]]:
    """Return rules whose texts of collectives are functions of `collectives`.

    Raises:
        LayoutError: a function that joins threads is to join ranks.
    """
    return {
        pattern: {
            key: _bound(action, collectives, full_gradients) for key, action in actions.items()
        }
        for pattern, actions in rules.items()
    }


def _bound(action: Any, collectives: Collectives, full_gradients: bool) -> Any:
    if isinstance(action, tuple):
        action = action[0]
    collectives.check(action)
    if isinstance(action, StateAction):
        if not full_gradients:
            return action
        return CopyThenCut(collectives.make("copy", -1, None, True), action)
    if not isinstance(action, str):
        return action
    kind, *options = action.split()
    if kind not in COMMUNICATING[full_gradients]:
        return action
    dim = int(options[0]) if options else -1
    return collectives.make(kind, dim, getattr(action, "sizes", None), full_gradients)


def is_copy(action: Any) -> bool:
    """Return whether an action with bound collectives leaves the value unchanged in the forward."""
    return action == "copy" or (isinstance(action, CollectiveBase) and action.kind == "copy")


def apply_action(value: Any, action: Any, *, rank: int, world_size: int) -> Any:
    """Apply an action with bound collectives to an input or output of a shard."""
    if isinstance(action, tuple):
        action = action[0]
    if callable(action):
        skips = isinstance(action, StateAction)
        if isinstance(action, CollectiveBase):
            skips = not action.takes_none
        return None if value is None and skips else action(value, rank=rank)
    kind, *options = action.split()
    if value is None or kind == "copy":
        return value
    if kind == "split":
        return torch.tensor_split(value, world_size, dim=int(options[0]))[rank]
    if kind == "scale":
        return value / world_size
    if kind == "scale_int":
        return scaled_int(value, world_size)
    raise LayoutError(f"{action!r} is not an action on a value; use {', '.join(TEXTS)}")


def scaled_int(value: Any, world_size: int) -> Any:
    remainder = value % world_size
    if remainder if not isinstance(value, Tensor) else bool(remainder.any()):
        raise LayoutError(
            f"scale_int of {value!r}, which is not a multiple of {world_size} shards; use fewer "
            "shards, or leave this value out of the plan"
        )
    return value // world_size
