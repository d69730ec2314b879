"""Matmuls of a column layer, whose backward overlaps the input gradient's all-reduce with the
weight gradients.

They are one node of autograd, whose backward computes the input's gradient, begins to sum it over
the group, and computes the gradients of the weights meanwhile, as Megatron-LM's does. With
`overlap` gather and reduce-scatter run in chunks (chunked.py), between which the product computes;
Megatron-LM calls that tp_comm_overlap.

Where a gradient of a gradient is asked for, the backward is made of differentiable operations, and
nothing overlaps. The pipeline's split backward knows the nodes: see deferred_wgrad.py. In a graph
(comm/operators.py) there are no nodes and no chunks: what overlaps is the compiler's to find.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.autograd import (
    AllGather,
    IdentityForward,
    Reduce,
    apply,
)
from torchdistpackage.comm.operators import is_traced
from torchdistpackage.comm.primitives import Group, Sizes, check_sizes
from torchdistpackage.parallel.tensor.chunked import (
    Chunks,
    Rows,
    num_chunks_of,
    start_gather,
    start_scatter,
)
from torchdistpackage.parallel.tensor.product_gradients import (
    Product,
    as_matrix,
    autocast,
    deferred,
    input_gradient,
    is_wanted,
    multiply,
    parameter_gradients,
    row_bytes,
    weight_gradient,
)


def column_products(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    sequence_parallel: bool = False,
    sizes: Sizes | None = None,
    overlap: bool = False,
    product: Product = F.linear,
) -> Sequence[Tensor]:
    """Return x W^T + b for each of the weights.

    x (S, ..., Din), or (S/n, ..., Din) under sequence parallelism; weights (Dout/n, Din), biases
    (Dout/n,), both of all weights or of none; results (S, ..., Dout/n). x is gathered once for all
    of them, and its gradient summed over the group once. sizes: under sequence parallelism the
    length of each rank's x, where they differ. product: another one than torch's, which nothing
    overlaps.
    """
    if group.size() == 1:
        return multiply(x, weights, biases, product)
    if torch.is_autocast_enabled(x.device.type):
        x, weights, biases = autocast(x, weights, biases)
    is_node = torch.is_grad_enabled() and product is F.linear and not is_traced()
    bias_tensors = biases if biases[0] is not None else ()
    if is_node and not sequence_parallel:
        if len(weights) == 1:
            return (_ColumnProduct.apply(x, group, *weights, *bias_tensors),)
        return _ColumnProducts.apply(x, group, len(weights), *weights, *bias_tensors)
    if not sequence_parallel:
        return multiply(apply(IdentityForward(group), x), weights, biases, product)
    into, chunks = AllGather(group, 0, check_sizes(x, 0, sizes, group, cut=False)), None
    if product is not F.linear or is_traced():
        return multiply(apply(into, x), weights, biases, product)
    if overlap:
        lengths = into.sizes or (x.shape[0],) * group.size()
        chunks = Chunks.of(lengths, num_chunks_of(lengths, row_bytes(x), group), group)
    if is_node:
        return _GatheredProducts.apply(x, into, chunks, len(weights), *weights, *bias_tensors)[1:]
    return _gather_and_multiply(x, into, chunks, weights, biases)[1:]


class _ColumnProduct(torch.autograd.Function):
    """A matmul of x and a weight; its backward overlaps the all-reduce of x's gradient with the
    other gradients.

    During the all-reduce it computes the gradients of weight and bias.

    As it is on every step's way, it has no loops: `_ColumnProducts` has them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return F.linear(x, weight, bias)

    @staticmethod
    def deferred_gradient(node: Any, argument: int) -> tuple[Any, ...]:
        """Return how to compute the gradient of parameter number `argument`, from 1, later."""
        return deferred(node, argument, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_grad = is_wanted(ctx)
        if torch.is_grad_enabled():
            dx, *others = _differentiable_gradients(x, (grad,), (weight,), needs_grad, ctx.group)
            return dx, None, *others
        part, finish = as_matrix(grad), None
        if needs_grad[0]:
            dx = part.mm(weight).view(x.shape)
            finish = primitives.all_reduce(dx, ctx.group, async_op=True).wait
        by_rows = weight.is_contiguous()
        of_weight = weight_gradient(as_matrix(x), part, by_rows) if needs_grad[1] else None
        if len(needs_grad) == 2:
            return None if finish is None else finish(), None, of_weight
        of_bias = part.sum(0) if needs_grad[2] else None
        return None if finish is None else finish(), None, of_weight, of_bias


class _ColumnProducts(torch.autograd.Function):
    """Matmuls of x and several weights, with one all-reduce of x's gradient for all of them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, num_weights: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:num_weights], parameters[num_weights:]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        ctx.group = group
        return tuple(multiply(x, weights, biases or (None,) * num_weights))

    @staticmethod
    def deferred_gradient(node: Any, argument: int) -> tuple[Any, ...]:
        """Return how to compute the gradient of a parameter later, as in `_ColumnProduct`."""
        return deferred(node, argument, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        needs_grad = is_wanted(ctx)
        if torch.is_grad_enabled():
            dx, *others = _differentiable_gradients(x, grads, weights, needs_grad, ctx.group)
            return dx, None, None, *others
        dx, finish = input_gradient(grads, weights) if needs_grad[0] else None, None
        if dx is not None:
            finish = primitives.all_reduce(dx, ctx.group, async_op=True).wait
        others = parameter_gradients(x, grads, weights, needs_grad[1:])
        return None if finish is None else finish(), None, None, *others


def _differentiable_gradients(
    x: Tensor,
    grads: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    needs_grad: Sequence[bool],
    group: Group,
) -> list[Tensor | None]:
    """Return the gradients of x and the parameters as a differentiable graph, without overlap."""
    dx = input_gradient(grads, weights) if needs_grad[0] else None
    x = apply(IdentityForward(group), x)  # of whose gradient each rank then has a part, as before
    others = parameter_gradients(x, grads, weights, needs_grad[1:])
    return [None if dx is None else apply(Reduce(group), dx), *others]


class _GatheredProducts(torch.autograd.Function):
    """Matmuls of the weights and x gathered along dim 0, with the same backward.

    chunks: in which x arrives and its gradient leaves, or None. The first result, the gathered x,
    exists only for gradients of gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        into: AllGather,
        chunks: Chunks | None,
        num_weights: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:num_weights], parameters[num_weights:]
        results = _gather_and_multiply(x, into, chunks, weights, biases or (None,) * num_weights)
        ctx.save_for_backward(results[0], *weights)
        ctx.set_materialize_grads(False)
        ctx.into, ctx.chunks = into, chunks
        return results

    @staticmethod
    def deferred_gradient(node: Any, argument: int) -> tuple[Any, ...]:
        """Return how to compute the gradient of a parameter later, as in `_ColumnProducts`."""
        return deferred(node, argument, 1)

    @staticmethod
    def backward(ctx: Any, of_whole: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        gathered_x, *weights = ctx.saved_tensors
        for_x, *for_parameters = is_wanted(ctx)
        dx, finish = None, None
        if for_x and ctx.chunks is not None and not torch.is_grad_enabled():
            finish = _start_scatter_in_chunks(grads, of_whole, weights, gathered_x, ctx.chunks)
        elif for_x and (dx := input_gradient(grads, weights, of_whole)) is not None:
            if torch.is_grad_enabled():
                dx = apply(ctx.into.transposed(), dx)
            else:
                into = ctx.into
                finish = primitives.reduce_scatter(dx, into.group, into.sizes, async_op=True).wait
        of_parameters = parameter_gradients(gathered_x, grads, weights, for_parameters)
        return dx if finish is None else finish(), None, None, None, *of_parameters


def _gather_and_multiply(
    x: Tensor,
    into: AllGather,
    chunks: Chunks | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """Return x of all ranks, and its matmuls with the weights."""
    if chunks is None:
        gathered = into(x)
        return gathered, *multiply(gathered, weights, biases)
    arrivals = start_gather(x, chunks)
    gathered = arrivals.into
    products = [x.new_empty((*gathered.shape[:-1], weight.shape[0])) for weight in weights]
    for rows in arrivals:
        for y, part in zip(products, multiply(gathered[rows], weights, biases), strict=True):
            y[rows] = part
    return gathered, *products


def _start_scatter_in_chunks(
    grads: Sequence[Tensor | None],
    of_whole: Tensor | None,
    weights: Sequence[Tensor],
    whole: Tensor,
    chunks: Chunks,
) -> Callable[[], Tensor]:
    """Begin to reduce-scatter the gradient of the gathered input; call the result for this rank's
    rows.
    """

    def rows_of(grad: Tensor | None, rows: Rows) -> Tensor | None:
        return None if grad is None else grad[rows]

    def compute(rows: Rows, buffer: Tensor) -> object:
        grad_rows = [rows_of(grad, rows) for grad in grads]
        dx = input_gradient(grad_rows, weights, rows_of(of_whole, rows))
        return buffer.zero_() if dx is None else buffer.copy_(dx)

    return start_scatter(chunks, whole[:0], compute)
