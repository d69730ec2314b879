"""The collectives as linear maps over the ranks of a group, and how autograd goes through one.

A map is a value that knows its transpose, and the backward of a map is the forward of
its transpose, gone through in the same way. So gradients of gradients need nothing more.

Two kinds of tensors meet here. *Replicated*: equal on all ranks, and one thing, whose gradient is
counted once. *Own*: each rank's is a thing by itself. `IdentityForward` leads from the first kind
to the second and `Reduce` back; so do `Scatter` and `Gather`. The others stay within the second.

While dynamo traces, a map is one operator (operators.py), which its `code` says, and the same class
computes it from the collectives of a graph, forwards and backwards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from torchdistpackage.comm import operators, primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.layout.partition import even_sizes

Lengths = tuple[int, ...] | None
"""Along one dim, by rank; None where all are equal."""


Code = tuple[str, tuple[int, ...], Lengths, Lengths]
"""A map but for its group, as its operator takes it: its kind in `KINDS`, numbers and lengths."""


class LinearMap(Protocol):
    """Computes the map, not writing to its argument (but see `Reduce`), and gives that of its
    gradients. calls: `primitives`, or `operators` in a graph."""

    @property
    def group(self) -> Group: ...

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor: ...

    def transposed(self) -> "LinearMap": ...

    def code(self) -> Code: ...


def apply(linear: LinearMap, x: Tensor) -> Tensor:
    """`linear` of `x`; a node of autograd where `x` needs a gradient."""
    if linear.group.size() == 1:
        return x
    if operators.is_traced():
        kind, numbers, first, second = linear.code()
        return operators.linear_map(x, kind, linear.group, numbers, first, second)
    if not x.requires_grad:
        return linear(x)
    if torch.is_grad_enabled():
        return _LinearMapFunction.apply(x, linear)
    return linear(x.detach())  # of which a view needs no gradient; of x itself it would


class _LinearMapFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, linear: LinearMap) -> Tensor:
        ctx.linear = linear
        if isinstance(linear, Reduce) and linear.in_place:
            ctx.mark_dirty(x)
        return linear(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        linear = ctx.linear.transposed()
        # what `apply` would ask is known here, but where gradients of gradients are wanted
        return linear(grad) if not torch.is_grad_enabled() else apply(linear, grad), None


class _TracedMapFunction(torch.autograd.Function):
    """The same inside the operator, whose backward is of a graph too."""

    @staticmethod
    def forward(ctx, x: Tensor, linear: LinearMap) -> Tensor:
        ctx.linear = linear
        return linear(x, operators)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _TracedMapFunction.apply(grad, ctx.linear.transposed()), None


@dataclass(frozen=True, slots=True)
class IdentityForward:
    """Replicated to own: each rank goes on with x for itself."""

    group: Group

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        return x if calls is primitives else x.view_as(x)  # an operator gives no input back

    def transposed(self) -> LinearMap:
        return Reduce(self.group)

    def code(self) -> Code:
        return "copy", (), None, None


@dataclass(frozen=True, slots=True)
class Reduce:
    """Own to replicated: the sum over the group.

    in_place: x is contiguous and has no other reader, so its memory takes the sum.
    """

    group: Group
    in_place: bool = False

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        return calls.all_reduce(x if self.in_place else _fresh(x), self.group)

    def transposed(self) -> LinearMap:
        return IdentityForward(self.group)

    def code(self) -> Code:
        return "reduce", (), None, None


@dataclass(frozen=True, slots=True)
class Scatter:
    """Replicated to own: my part along `dim`."""

    group: Group
    dim: int
    sizes: Lengths

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        sizes = self.sizes or even_sizes(x.shape[self.dim], self.group.size())
        mine = self.group.rank()
        # a part that were a view would keep all of it alive
        return _fresh(x.narrow(self.dim, sum(sizes[:mine]), sizes[mine]))

    def transposed(self) -> LinearMap:
        return Gather(self.group, self.dim, self.sizes)

    def code(self) -> Code:
        return "scatter", (self.dim,), self.sizes, None


@dataclass(frozen=True, slots=True)
class Gather:
    """Own to replicated: the parts joined along `dim`."""

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


@dataclass(frozen=True, slots=True)
class AllGather(Gather):
    """Own to own: the parts joined along `dim`, of which each rank makes a use of its own."""

    def transposed(self) -> LinearMap:
        return ReduceScatter(self.group, self.dim, self.sizes)

    def code(self) -> Code:
        return "all_gather", (self.dim,), self.sizes, None


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """Own to own: my part along `dim` of the sum over the group."""

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


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Own to own: part i along `split_dim` goes to rank i; what arrives is joined along `join_dim`.

    split_sizes: the lengths of my parts; join_sizes: of those that arrive.
    """

    group: Group
    split_dim: int
    join_dim: int
    split_sizes: Lengths
    join_sizes: Lengths

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        shapes = self._arriving(x)
        # parts of different shapes cannot be rows of one tensor, so all travel flat
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

    def _split(self, x: Tensor) -> tuple[int, ...]:
        return self.split_sizes or even_sizes(x.shape[self.split_dim], self.group.size())

    def _arriving(self, x: Tensor) -> list[list[int]]:
        """Shape of the part from each rank, `split_dim` first."""
        mine = self._split(x)[self.group.rank()]
        shapes = []
        for rank in range(self.group.size()):
            shape = list(x.shape)
            shape[self.split_dim] = mine
            if self.join_sizes is not None:
                shape[self.join_dim] = self.join_sizes[rank]
            shapes.append([shape.pop(self.split_dim), *shape])
        return shapes


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Own to own: that of global rank `source`, on every rank."""

    group: Group
    source: int

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        return calls.broadcast(_fresh(x), self.group, self.source)

    def transposed(self) -> LinearMap:
        return ReduceTo(self.group, self.source)

    def code(self) -> Code:
        return "broadcast", (self.source,), None, None


@dataclass(frozen=True, slots=True)
class ReduceTo:
    """Own to own: the sum over the group on global rank `source`, zeros elsewhere."""

    group: Group
    source: int

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        total = calls.all_reduce(_fresh(x), self.group)
        mine = primitives.ranks_of(self.group)[self.group.rank()]
        return total if mine == self.source else total.zero_()

    def transposed(self) -> LinearMap:
        return Broadcast(self.group, self.source)

    def code(self) -> Code:
        return "reduce_to", (self.source,), None, None


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
"""Kind of a map -> the map of a group, two lengths and its numbers, from its `code`. A map of
another file adds its own."""


@operators.define_linear_map
def _run(
    x: Tensor,
    kind: str,
    group: Group,
    numbers: tuple[int, ...],
    first: list[int] | None,
    second: list[int] | None,
) -> Tensor:
    lengths = (None if sizes is None else tuple(sizes) for sizes in (first, second))
    linear = KINDS[kind](group, *lengths, *numbers)
    if torch.is_grad_enabled() and x.requires_grad:
        return _TracedMapFunction.apply(x, linear)
    return linear(x.detach(), operators)


def _fresh(x: Tensor) -> Tensor:
    """A contiguous copy: `x` may be an expanded gradient, or what autograd holds. Its numbers are
    in memory as they are; those of a lazily conjugated tensor differ."""
    return x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _rows(x: Tensor, dim: int) -> Tensor:
    """`dim` first, as the primitives cut and join."""
    return x.movedim(dim, 0) if dim else x


def _from_rows(rows: Tensor, dim: int) -> Tensor:
    return rows.movedim(0, dim).contiguous() if dim else rows
