"""Products that compute between the chunks in which their input, or result, travels.

Two nodes of autograd stand where a product meets other ranks: one sends or brings together, one
multiplies. What one of them began, the other waits for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdistpackage.comm.autograd import AllGather, LinearMap, ReduceScatter, apply
from torchdistpackage.comm.primitives import Group
from torchdistpackage.parallel.tensor.chunked import (
    Chunks,
    Coming,
    Handoff,
    Rows,
    num_chunks_of,
    start_gather,
    start_scatter,
)
from torchdistpackage.parallel.tensor.product_gradients import (
    as_matrix,
    input_gradient,
    is_wanted,
    multiply,
    parameter_gradient,
    places_of,
    row_bytes,
)


def overlapped_column(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], gather: AllGather
) -> Tensor:
    """The products of `gather` of x, side by side; no bias, or one for each weight."""
    lengths = gather.sizes or (x.shape[0],) * gather.group.size()
    chunks = Chunks.of(lengths, num_chunks_of(lengths, row_bytes(x)), gather.group)
    ends = _Ends(len(weights), Handoff(), Coming(), chunks)
    return _product(apply(_Entry(gather, ends.sent, chunks, ends.coming), x), ends, weights, biases)


def overlapped_row(x: Tensor, weight: Tensor, scatter: ReduceScatter) -> Tensor:
    """`scatter` of the product."""
    group = scatter.group
    lengths = scatter.sizes or (x.shape[0] // group.size(),) * group.size()
    num_bytes = row_bytes(x) // max(x.shape[-1], 1) * weight.shape[0]
    chunks = Chunks.of(lengths, num_chunks_of(lengths, num_bytes), group)
    ends = _Ends(1, Handoff(), Coming(), chunks, scatters=True)
    out_of = _Exit(scatter, ends.sent, chunks, ends.coming)
    return apply(out_of, _product(x, ends, (weight,), ()))


@dataclass(slots=True, eq=False)
class _Ends:
    """What a product does where it meets other ranks, in one forward and its backwards.

    sent: what the product began to send, of its result or of the gradient of x. coming: what it
    waits for, x or the gradient of its result. scatters: the result is summed and scattered, as of
    a row product.
    """

    num_weights: int
    sent: Handoff
    coming: Coming
    chunks: Chunks
    scatters: bool = False


@dataclass(frozen=True, slots=True)
class _Begun:
    """`plain`, of which the product may have begun the call already."""

    plain: LinearMap
    sent: Handoff

    @property
    def group(self) -> Group:
        return self.plain.group

    def __call__(self, x: Tensor) -> Tensor:
        finish = self.sent.take()
        return self.plain(x) if finish is None else finish()

    def transposed(self) -> LinearMap:
        return self.plain.transposed()


@dataclass(frozen=True, slots=True)
class _Entry(_Begun):
    """The input of a column product, begun in chunks."""

    chunks: Chunks
    coming: Coming

    def __call__(self, x: Tensor) -> Tensor:
        self.coming.arrivals = start_gather(x, self.chunks)
        return self.coming.arrivals.into

    def transposed(self) -> LinearMap:
        return _Begun(self.plain.transposed(), self.sent)


@dataclass(frozen=True, slots=True)
class _Exit(_Begun):
    """The result of a row product, of which the product sends a chunk once it has computed it."""

    chunks: Chunks
    coming: Coming

    def transposed(self) -> LinearMap:
        return _Entry(self.plain.transposed(), Handoff(), self.chunks, self.coming)


def _product(x: Tensor, ends: _Ends, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    if torch.is_grad_enabled():
        return _Product.apply(x, ends, *weights, *biases)
    return _forward(x, ends, weights, biases)


def _forward(x: Tensor, ends: _Ends, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    width = sum(weight.shape[0] for weight in weights)
    if ends.scatters:
        like = x.new_empty((0, *x.shape[1:-1], width))
        matrix = weights[0].t()

        def compute(rows: Rows, into: Tensor) -> object:
            return torch.mm(as_matrix(x[rows]), matrix, out=as_matrix(into))

        ends.sent.finish = start_scatter(ends.chunks, like, compute)
        return x.new_zeros(()).expand(*x.shape[:-1], width)  # of the shape; it is never read
    arrivals = ends.coming.take()
    assert arrivals is not None
    y = x.new_empty((*x.shape[:-1], width))
    for rows in arrivals:
        y[rows] = multiply(x[rows], weights, biases)
    return y


class _Product(torch.autograd.Function):
    """x (S, ..., Din) and weights, then biases, to their products side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: _Ends, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[: ends.num_weights], parameters[ends.num_weights :]
        ctx.save_for_backward(x, *weights)
        ctx.ends, ctx.places = ends, places_of(weights, len(biases))
        return _forward(x, ends, weights, biases)

    @staticmethod
    def deferred_gradient(node: Any, argument: int) -> tuple[Any, ...]:
        """How `deferred_wgrad` has that of parameter number `argument`, from 1, computed later."""
        return parameter_gradient, *node.places[argument - 1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        ends: _Ends = ctx.ends
        for_x, *for_parameters = is_wanted(ctx, 2)
        dx = None
        if torch.is_grad_enabled():
            if (arrivals := ends.coming.take()) is not None:
                arrivals.whole()
            if for_x:
                dx = input_gradient(grad, weights)
        elif ends.scatters:
            dx = _arriving_input_gradient(grad, x, weights, ends, for_x)
        elif for_x:

            def compute(rows: Rows, into: Tensor) -> object:
                return into.copy_(input_gradient(grad[rows], weights))

            ends.sent.finish = start_scatter(ends.chunks, x[:0], compute)
            # of the shape; the node before it has the sum
            dx = x.new_zeros(()).expand(x.shape)
        grads = [
            parameter_gradient(x, grad, *place) if wanted else None
            for place, wanted in zip(ctx.places, for_parameters, strict=True)
        ]
        return dx, None, *grads


def _arriving_input_gradient(
    grad: Tensor, x: Tensor, weights: Sequence[Tensor], ends: _Ends, for_x: bool
) -> Tensor | None:
    """The gradient of x of a row product, while that of its result comes."""
    arrivals = ends.coming.take()
    assert arrivals is not None
    dx = x.new_empty(x.shape) if for_x else None
    for rows in arrivals:
        if dx is not None:
            dx[rows] = input_gradient(grad[rows], weights)
    return dx
