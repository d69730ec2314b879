"""The collectives as linear maps over the ranks of a group, and their autograd.

A map is a value that knows its transpose. The backward of a map is the forward of its transpose,
run in the same way, so gradients of gradients need nothing more.

Tensors are of two kinds. *Replicated*: equal on all ranks, one tensor whose gradient counts once.
*Own*: each rank's tensor is independent. `IdentityForward` and `Scatter` map replicated tensors to
own ones, `Reduce` and `Gather` map them back, and the others map own to own.

While dynamo traces, a map is one operator (operators.py), described by its `code`. The same class
computes the operator from a graph's collectives, forwards and backwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from torchdistpackage.comm import operators, primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.layout.partition import even_sizes

Lengths = tuple[int, ...] | None
"""Lengths along one dim, by rank; None: all are equal."""


Inputs = Sequence[Tensor]
Cuts = Sequence[Sequence[int]]

Code = tuple[str, tuple[int, ...], Lengths, Lengths]
"""A map without its group, in the form its operator takes: its kind in `KINDS`, numbers and
lengths.
"""


class LinearMap(Protocol):
    """A linear map over the ranks of a group; it knows its transpose.

    It does not write to its argument, except `Reduce` with in_place.

    calls: `primitives`, or `operators` in a graph.
    """

    @property
    def group(self) -> Group: ...

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor: ...

    def transposed(self) -> "LinearMap": ...

    def code(self) -> Code: ...

    @staticmethod
    def answer(xs: Inputs, index: int, cuts: Cuts, *numbers: int) -> Tensor:
        """Return the result of the rank at `index` of the group, computed by plain torch, for
        tests.

        xs: the inputs of all ranks. cuts: the lengths into which each rank cuts the first split
        dim. numbers: dims, or the index of a source in the group.
        """
        ...


def apply(linear: LinearMap, x: Tensor) -> Tensor:
    """Apply `linear` to `x`, with a node of autograd if `x` needs a gradient."""
    if linear.group.size() == 1:
        return x
    if operators.is_traced():
        kind, numbers, first, second = linear.code()
        return operators.linear_map(x, kind, linear.group, numbers, first, second)
    if not x.requires_grad:
        return linear(x)
    if torch.is_grad_enabled():
        return _LinearMapFunction.apply(x, linear)
    # detached, because a map that returns a view of x would return one that requires a gradient
    return linear(x.detach())


class _LinearMapFunction(torch.autograd.Function):
    """Autograd of a map: its backward is the transpose."""

    @staticmethod
    def forward(ctx, x: Tensor, linear: LinearMap) -> Tensor:
        ctx.linear = linear
        if isinstance(linear, Reduce) and linear.in_place:
            ctx.mark_dirty(x)
        return linear(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        linear = ctx.linear.transposed()
        # call it directly, without the questions of `apply`, unless gradients of gradients are
        # wanted
        return linear(grad) if not torch.is_grad_enabled() else apply(linear, grad), None


class _TracedMapFunction(torch.autograd.Function):
    """Autograd of a map inside its operator; the graph's collectives run in the backward too."""

    @staticmethod
    def forward(ctx, x: Tensor, linear: LinearMap) -> Tensor:
        ctx.linear = linear
        return linear(x, operators)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _TracedMapFunction.apply(grad, ctx.linear.transposed()), None


@dataclass(frozen=True, slots=True)
class IdentityForward:
    """Replicated to own: each rank continues separately with x."""

    group: Group

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        return x if calls is primitives else x.view_as(x)  # an operator must not return its input

    def transposed(self) -> LinearMap:
        return Reduce(self.group)

    def code(self) -> Code:
        return "copy", (), None, None

    @staticmethod
    def answer(xs: Inputs, index: int, cuts: Cuts, *numbers: int) -> Tensor:
        return xs[index]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Own to replicated: the sum over the group.

    in_place: x is contiguous and has no other reader, so the sum goes into its memory.
    """

    group: Group
    in_place: bool = False

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        return calls.all_reduce(x if self.in_place else _fresh(x), self.group)

    def transposed(self) -> LinearMap:
        return IdentityForward(self.group)

    def code(self) -> Code:
        return "reduce", (), None, None

    @staticmethod
    def answer(xs: Inputs, index: int, cuts: Cuts, *numbers: int) -> Tensor:
        return sum(xs[1:], xs[0])


@dataclass(frozen=True, slots=True)
class Scatter:
    """Replicated to own: this rank's slice along `dim`."""

    group: Group
    dim: int
    sizes: Lengths

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        sizes = self.sizes or even_sizes(x.shape[self.dim], self.group.size())
        index = self.group.rank()
        # a copy, because a view would keep the full tensor alive
        return _fresh(x.narrow(self.dim, sum(sizes[:index]), sizes[index]))

    def transposed(self) -> LinearMap:
        return Gather(self.group, self.dim, self.sizes)

    def code(self) -> Code:
        return "scatter", (self.dim,), self.sizes, None

    @staticmethod
    def answer(xs: Inputs, index: int, cuts: Cuts, *numbers: int) -> Tensor:
        return xs[index].split(list(cuts[index]), numbers[0])[index]


@dataclass(frozen=True, slots=True)
class Gather:
    """Gather: every rank gets the full tensor, made of all slices joined along `dim`."""

    group: Group
    dim: int
    sizes: Lengths

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        rows = calls.all_gather(_rows(x, self.dim), self.group, self.sizes)
        return _from_rows(rows, self.dim)

    def transposed(self) -> LinearMap:
        return Scatter(self.group, self.dim, self.sizes)

    def code(self) -> Code:
        return "gather", (self.dim,), self.sizes, None

    @staticmethod
    def answer(xs: Inputs, index: int, cuts: Cuts, *numbers: int) -> Tensor:
        return torch.cat(list(xs), numbers[0])


@dataclass(frozen=True, slots=True)
class AllGather(Gather):
    """Own to own: all slices joined along `dim`, used by each rank separately."""

    def transposed(self) -> LinearMap:
        return ReduceScatter(self.group, self.dim, self.sizes)

    def code(self) -> Code:
        return "all_gather", (self.dim,), self.sizes, None


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Own to own: this rank's slice along `dim` of the sum over the group."""

    group: Group
    dim: int
    sizes: Lengths

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        rows = calls.reduce_scatter(_rows(x, self.dim), self.group, self.sizes)
        return _from_rows(rows, self.dim)

    def transposed(self) -> LinearMap:
        return AllGather(self.group, self.dim, self.sizes)

    def code(self) -> Code:
        return "reduce_scatter", (self.dim,), self.sizes, None

    @staticmethod
    def answer(xs: Inputs, index: int, cuts: Cuts, *numbers: int) -> Tensor:
        return Scatter.answer([sum(xs[1:], xs[0])] * len(xs), index, cuts, *numbers)


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Own to own: slice i along `split_dim` goes to rank i; arriving slices join along `join_dim`.

    split_sizes: lengths of this rank's slices. join_sizes: lengths of the arriving ones.
    """

    group: Group
    split_dim: int
    join_dim: int
    split_sizes: Lengths
    join_sizes: Lengths

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        shapes = self._arriving(x)
        # slices of different shapes cannot be rows of one tensor, so they travel flattened
        flat = _rows(x, self.split_dim).reshape(-1)
        numels = [prod(shape) for shape in shapes]
        if self.split_sizes is None and self.join_sizes is None:
            flat = calls.all_to_all(flat, self.group)
        else:
            row = prod(x.shape) // max(x.shape[self.split_dim], 1)
            send = [length * row for length in self._split(x)]
            flat = calls.all_to_all(flat, self.group, send, numels)
        parts = [
            part.view(shape).movedim(0, self.split_dim)
            for part, shape in zip(flat.split(numels), shapes, strict=True)
        ]
        return torch.cat(parts, self.join_dim)

    def transposed(self) -> LinearMap:
        return AllToAll(
            self.group, self.join_dim, self.split_dim, self.join_sizes, self.split_sizes
        )

    def code(self) -> Code:
        return "all_to_all", (self.split_dim, self.join_dim), self.split_sizes, self.join_sizes

    @staticmethod
    def answer(xs: Inputs, index: int, cuts: Cuts, *numbers: int) -> Tensor:
        split, join = numbers
        parts = [x.split(list(cut), split) for x, cut in zip(xs, cuts, strict=True)]
        return torch.cat([part[index] for part in parts], join)

    def _split(self, x: Tensor) -> tuple[int, ...]:
        return self.split_sizes or even_sizes(x.shape[self.split_dim], self.group.size())

    def _arriving(self, x: Tensor) -> list[list[int]]:
        """Return the shape of the slice from each rank, `split_dim` first."""
        own_length = self._split(x)[self.group.rank()]
        shapes = []
        for rank in range(self.group.size()):
            shape = list(x.shape)
            shape[self.split_dim] = own_length
            if self.join_sizes is not None:
                shape[self.join_dim] = self.join_sizes[rank]
            shapes.append([shape.pop(self.split_dim), *shape])
        return shapes


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Own to own: every rank gets the tensor of global rank `source`."""

    group: Group
    source: int

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        return calls.broadcast(_fresh(x), self.group, self.source)

    def transposed(self) -> LinearMap:
        return ReduceTo(self.group, self.source)

    def code(self) -> Code:
        return "broadcast", (self.source,), None, None

    @staticmethod
    def answer(xs: Inputs, index: int, cuts: Cuts, *numbers: int) -> Tensor:
        return xs[numbers[0]]


@dataclass(frozen=True, slots=True)
class ReduceTo:
    """Own to own: the sum over the group on global rank `source`, zeros elsewhere."""

    group: Group
    source: int

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        total = calls.all_reduce(_fresh(x), self.group)
        rank = primitives.ranks_of(self.group)[self.group.rank()]
        return total if rank == self.source else total.zero_()

    def transposed(self) -> LinearMap:
        return Broadcast(self.group, self.source)

    def code(self) -> Code:
        return "reduce_to", (self.source,), None, None

    @staticmethod
    def answer(xs: Inputs, index: int, cuts: Cuts, *numbers: int) -> Tensor:
        return sum(xs[1:], xs[0]) * (index == numbers[0])


KINDS: dict[str, Callable[..., LinearMap]] = {
    "copy": lambda group, first, second: IdentityForward(group),
    "reduce": lambda group, first, second: Reduce(group),
    "scatter": lambda group, first, second, dim: Scatter(group, dim, first),
    "gather": lambda group, first, second, dim: Gather(group, dim, first),
    "all_gather": lambda group, first, second, dim: AllGather(group, dim, first),
    "reduce_scatter": lambda group, first, second, dim: ReduceScatter(group, dim, first),
    "all_to_all": lambda group, first, second, split, join: AllToAll(
        group, split, join, first, second
    ),
    "broadcast": lambda group, first, second, source: Broadcast(group, source),
    "reduce_to": lambda group, first, second, source: ReduceTo(group, source),
}
"""Kind -> a function that builds the map from a group, two lengths and its numbers, as in `code`.
Maps in other files add their own."""


@operators.define_linear_map
def _run(
    x: Tensor,
    kind: str,
    group: Group,
    numbers: tuple[int, ...],
    first: list[int] | None,
    second: list[int] | None,
) -> Tensor:
    """Compute a traced map: build it from its code, and apply it."""
    lengths = (None if sizes is None else tuple(sizes) for sizes in (first, second))
    linear = KINDS[kind](group, *lengths, *numbers)
    if torch.is_grad_enabled() and x.requires_grad:
        return _TracedMapFunction.apply(x, linear)
    return linear(x.detach(), operators)


def _fresh(x: Tensor) -> Tensor:
    """Return a contiguous copy, because `x` may be an expanded gradient or a tensor held by
    autograd.

    A lazily conjugated or negated tensor is resolved, because back ends read its memory directly.
    """
    return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _rows(x: Tensor, dim: int) -> Tensor:
    """Move `dim` to the front, where the primitives cut and join."""
    return x.movedim(dim, 0) if dim else x


def _from_rows(rows: Tensor, dim: int) -> Tensor:
    """Move the first dim back to `dim`, contiguous."""
    return rows.movedim(0, dim).contiguous() if dim else rows
