"""Products of a tensor-parallel layer, whose communication runs while they compute.

A column product is one node of autograd: its backward computes the input's gradient, begins to sum
it over the group, and computes the gradients of the weights meanwhile. With `overlap` the forward's
gather, and both ends of a row product, run in chunks as well (overlapped.py). Megatron-LM does the
first by default and calls the second tp_comm_overlap.

Where a gradient of a gradient is asked for, the backward is made of differentiable operations, and
nothing overlaps. The pipeline's split backward knows the node: see deferred_wgrad.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.autograd import (
    AllGather,
    IdentityForward,
    Reduce,
    ReduceScatter,
    apply,
)
from torchdistpackage.comm.primitives import Group, Sizes, check_sizes
from torchdistpackage.comm.work import Work
from torchdistpackage.parallel.tensor.overlapped import overlapped_column, overlapped_row
from torchdistpackage.parallel.tensor.product_gradients import (
    as_matrix,
    input_gradient,
    is_wanted,
    multiply,
    parameter_gradient,
    places_of,
)


def column_product(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    sequence_parallel: bool = False,
    sizes: Sizes | None = None,
    overlap: bool = False,
) -> Tensor:
    """[x W^T + b] of each of the weights, side by side in the last dim.

    x (S, ..., Din), or (S/n, ..., Din) under sequence parallelism; weights (Dout/n, Din), biases
    (Dout/n,), both of all weights or of none; result (S, ..., sum of Dout/n). The gradient of x is
    summed over the group. sizes: under sequence parallelism the length of each rank's x, where they
    differ.
    """
    if group.size() == 1:
        return multiply(x, weights, biases)
    sizes = check_sizes(x, 0, sizes, group, cut=False) if sequence_parallel else None
    x, weights, biases = _autocast(x, weights, biases)
    given = [b for b in biases if b is not None]
    if overlap and sequence_parallel:
        return overlapped_column(x, weights, given, AllGather(group, 0, sizes))
    into = AllGather(group, 0, sizes) if sequence_parallel else IdentityForward(group)
    if torch.is_grad_enabled():
        return _ColumnProduct.apply(x, into, len(weights), *weights, *given)[0]
    return multiply(into(x), weights, given)


def row_product(
    x: Tensor,
    weight: Tensor,
    group: Group,
    sequence_parallel: bool = False,
    sizes: Sizes | None = None,
    overlap: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """x W^T summed over the group, from each rank's columns of x, and then the bias.

    x (S, ..., Din/n); weight (Dout, Din/n); result (S, ..., Dout), or (S/n, ..., Dout) under
    sequence parallelism. sizes: the length of each rank's result, where they differ. bias (Dout,),
    equal on all ranks: so is its gradient, which is that of all rows.

    Raises:
        LayoutError: under sequence parallelism without `sizes`, S is not a multiple of the group's
            size.
    """
    if group.size() == 1:
        return _plus(F.linear(x, weight), bias)
    if not sequence_parallel:
        return _plus(apply(Reduce(group, in_place=True), F.linear(x, weight)), bias)
    sizes = check_sizes(x, 0, sizes, group, cut=True)
    plain = ReduceScatter(group, 0, sizes)
    if not overlap:
        y = F.linear(x, weight)
        return apply(plain, y) if bias is None else _ScatterAdd.apply(y, bias, plain)
    x, (weight,), _ = _autocast(x, (weight,), ())
    y = overlapped_row(x, weight, plain)
    return _plus(y, None if bias is None else apply(IdentityForward(group), bias))


class _ColumnProduct(torch.autograd.Function):
    """x as a map brings it together, and its products with the weights side by side.

    The first of the two is a result for gradients of gradients alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        into: AllGather | IdentityForward,
        num_weights: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        weights, biases = parameters[:num_weights], parameters[num_weights:]
        whole = into(x)
        ctx.save_for_backward(whole, *weights)
        ctx.set_materialize_grads(False)
        ctx.into, ctx.places = into, places_of(weights, len(biases))
        return multiply(whole, weights, biases), whole

    @staticmethod
    def deferred_gradient(node: Any, argument: int) -> tuple[Any, ...]:
        """How `deferred_wgrad` has that of parameter number `argument`, from 1, computed later."""
        return parameter_gradient, *node.places[argument - 1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_whole: Tensor | None) -> tuple[Any, ...]:
        whole, *weights = ctx.saved_tensors
        for_x, *for_parameters = is_wanted(ctx, 3)
        dx, work = of_whole, None
        if grad is not None and for_x:
            dx = input_gradient(grad, weights)
            dx = dx if of_whole is None else dx + of_whole
        if for_x and dx is not None and not torch.is_grad_enabled():
            work = _start_sum(dx, ctx.into)
        grads = [
            parameter_gradient(whole, grad, *place) if wanted and grad is not None else None
            for place, wanted in zip(ctx.places, for_parameters, strict=True)
        ]
        if work is not None:
            dx = work.wait()
        elif for_x and dx is not None:
            dx = apply(ctx.into.transposed(), dx)
        return dx, None, None, *grads


def _start_sum(dx: Tensor, into: AllGather | IdentityForward) -> Work:
    """The sum over the group of the gradients of what `into` made, begun; what two ranks swap is
    summed at once, as that takes less time than a start."""
    later = not primitives.is_swapped(dx, into.group)
    if isinstance(into, AllGather):
        total = primitives.reduce_scatter(dx, into.group, into.sizes, later)
    else:
        total = primitives.all_reduce(dx, into.group, async_op=later)
    return total if later else Work(total)


class _ScatterAdd(torch.autograd.Function):
    """The sum over the group, scattered, plus a bias. The backward gathers the gradients of all
    rows, so that of the bias needs no message of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, scatter: ReduceScatter) -> Tensor:
        ctx.scatter, ctx.dtypes = scatter, (x.dtype, bias.dtype)
        return scatter(x) + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dtype, bias_dtype = ctx.dtypes
        rows = apply(ctx.scatter.transposed(), grad.to(dtype))
        of_bias = as_matrix(rows).sum(0, dtype=bias_dtype) if ctx.needs_input_grad[1] else None
        return rows, of_bias, None


def _autocast(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
    """In the dtype in which products are computed here."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weights, biases
    dtype = torch.get_autocast_dtype(kind)

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t

    return cast(x), [cast(w) for w in weights], [b if b is None else cast(b) for b in biases]


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
