"""Collectives of threads whose replicated tensors have the full gradient on every shard.

The maps are those of comm/autograd.py, here over all shards at once in one node of the graph:

map            forward of shard i          backward of shard i
CopyToShards   x_i                         sum of all gradients
SumOfShards    sum of all x                its own gradient
JoinShards     all x joined along dim      its part of its own gradient
ScatterShards  its part of x_i             all gradients joined along dim
"""

from typing import Any

import torch
from torch import Tensor

from torchdistpackage.compat.tensor_parallel.engine.gradients import own_of_caller
from torchdistpackage.compat.tensor_parallel.engine.ops import CollectiveBase
from torchdistpackage.compat.tensor_parallel.rendezvous import (
    CollectiveOperation,
    ThreadGather,
    ThreadSum,
    current_run,
    joins,
    sums,
)
from torchdistpackage.errors import CommError


class CopyToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(sums(*grads))


class SumOfShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(sums(*xs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


class JoinShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.dim, ctx.sizes = dim, [x.shape[dim] for x in xs]
        return tuple(joins(xs, dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(g.split(ctx.sizes, ctx.dim)[rank] for rank, g in enumerate(grads))


class ScatterShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.dim = dim
        parts = (torch.tensor_split(x, len(xs), dim)[rank] for rank, x in enumerate(xs))
        return tuple(part.contiguous() for part in parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *joins(grads, ctx.dim)


class GradientToAll(torch.autograd.Function):
    """The output of one shard, whose gradient all shards get, as each has computed it."""

    @staticmethod
    def forward(ctx: Any, index: int, *xs: Tensor) -> Tensor:
        ctx.devices = [x.device for x in xs]
        return own_of_caller(xs[index])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad.to(device) for device in ctx.devices)


class ThreadMap(CollectiveOperation):
    """One of these maps, at which the threads meet."""

    def __init__(self, world_size: int, kind: str, func: Any, dim: int = -1):
        super().__init__(world_size, func)
        self.kind, self.dim = kind, dim

    def __reduce__(self) -> tuple[Any, ...]:
        return thread_map, (self.kind, self.world_size, self.dim)

    def __call__(self, x: Any, rank: int) -> Any:
        """See `CollectiveOperation`. Raises CommError where one shard is called by itself."""
        if current_run.get() is None:
            raise CommError(
                f"shard {rank} of {self.world_size} was called by itself and would wait for the "
                f"others; call the model that tensor_parallel returned, without activation "
                f"checkpointing, which computes one shard after another again"
            )
        return super().__call__(x, rank)


def thread_map(kind: str, world_size: int, dim: int = -1) -> ThreadMap:
    """Return the map for "copy", "sum", "gather" or "split"."""
    plain = {"copy": CopyToShards, "sum": SumOfShards}
    if kind in plain:
        return ThreadMap(world_size, kind, plain[kind].apply, dim)
    along: Any = JoinShards if kind == "gather" else ScatterShards
    return ThreadMap(world_size, kind, lambda *xs: along.apply(dim, *xs), dim)


class ThreadCollectives:
    """The `Collectives` of `num` threads of this process, each of which computes one shard."""

    def __init__(self, num: int):
        self.num = num

    def make(
        self, kind: str, dim: int, sizes: tuple[int, ...] | None, full_gradients: bool
    ) -> CollectiveBase:
        if full_gradients:
            return thread_map(kind, self.num, dim)
        return ThreadSum(self.num) if kind == "sum" else ThreadGather(self.num, dim=dim)

    def check(self, action: object) -> None:
        """Nothing: threads call everything."""
