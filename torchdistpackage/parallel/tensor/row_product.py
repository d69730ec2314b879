"""The matmul of a row layer, and its all-reduce over the group.

With `overlap` it is one autograd node whose rows travel in chunks (chunked.py) both ways,
overlapping the matmuls; column_product.py describes the rest.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm.autograd import (
    IdentityForward,
    Reduce,
    ReduceScatter,
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
    is_wanted,
    later_weight_gradient,
    parameter_gradients,
    row_bytes,
)


def row_product(
    x: Tensor,
    weight: Tensor,
    group: Group,
    sequence_parallel: bool = False,
    sizes: Sizes | None = None,
    overlap: bool = False,
    bias: Tensor | None = None,
    product: Product = F.linear,
) -> Tensor:
    """Return x W^T summed over the group, from each rank's columns of x, plus the bias.

    x (S, ..., Din/n); weight (Dout, Din/n); result (S, ..., Dout), or (S/n, ..., Dout) under
    sequence parallelism. sizes: the length of each rank's result, where they differ. bias (Dout,),
    equal on all ranks: so is its gradient, which is that of all rows.

    Raises:
        LayoutError: under sequence parallelism without `sizes`, S is not a multiple of the group's
            size.
    """
    if group.size() == 1:
        return _plus(product(x, weight), bias)
    if not sequence_parallel:
        return _plus(apply(Reduce(group, in_place=True), product(x, weight)), bias)
    sizes = check_sizes(x, 0, sizes, group, cut=True)
    plain = ReduceScatter(group, 0, sizes)
    if is_traced():
        y = product(x, weight)
        if bias is None:
            return apply(plain, y)
        # zeros, by which the gathered gradient of all rows reaches the bias with no sum of its own
        return apply(plain, y + (bias - bias.detach())) + bias.detach()
    if not overlap or product is not F.linear:
        y = product(x, weight)
        return apply(plain, y) if bias is None else _ScatterAdd.apply(y, bias, plain)
    if torch.is_autocast_enabled(x.device.type):
        x, (weight,), _ = autocast(x, (weight,), ())
    lengths = sizes or (x.shape[0] // group.size(),) * group.size()
    num_bytes = row_bytes(x) // max(x.shape[-1], 1) * weight.shape[0]  # of a row of the result
    chunks = Chunks.of(lengths, num_chunks_of(lengths, num_bytes, group), group)
    if torch.is_grad_enabled():
        y = _RowProduct.apply(x, plain, chunks, weight)
    else:
        y = _multiply_and_scatter(x, weight, chunks)
    return _plus(y, None if bias is None else apply(IdentityForward(group), bias))


def share_of_bias(bias: Tensor, num_ranks: int) -> Tensor:
    """Return what each rank adds to its partial sum, so that the sum includes `bias` once.

    Its gradient is that of the full bias, and equal on all ranks, so nobody sums it.
    """
    return bias - (bias * (1 - 1 / num_ranks)).detach()


class _RowProduct(torch.autograd.Function):
    """This rank's rows of the group's sum of x W^T; both ways the rows travel in `chunks`.

    A deferred gradient of W needs the gradient of all rows, which this backward gathers.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scatter: ReduceScatter, chunks: Chunks, weight: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scatter, ctx.chunks = scatter, chunks
        ctx.gathered = _Gathered()
        return _multiply_and_scatter(x, weight, chunks)

    @staticmethod
    def deferred_gradient(node: Any, argument: int) -> tuple[Any, ...]:
        """Return how `deferred_wgrad` computes the gradient of the weight later."""
        node.gathered.is_awaited = True
        return 0, _deferred_row_gradient, node.gathered, node.saved_tensors[1].is_contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight = is_wanted(ctx)
        if torch.is_grad_enabled():
            full_grad = apply(ctx.scatter.transposed(), grad)
            dx = full_grad @ weight if for_x else None
        else:
            arrivals = start_gather(grad, ctx.chunks)
            full_grad, dx = arrivals.into, x.new_empty(x.shape) if for_x else None
            for rows in arrivals:
                if dx is not None:
                    dx[rows] = full_grad[rows] @ weight
        if ctx.gathered.is_awaited:
            ctx.gathered.grad = full_grad
        (of_weight,) = parameter_gradients(x, (full_grad,), (weight,), (for_weight,))
        return dx, None, None, of_weight


class _Gathered:
    """The gradient of all rows of a row layer's matmul, kept if that of its weight comes later."""

    def __init__(self) -> None:
        self.is_awaited = False
        self.grad: Tensor | None = None

    def take(self) -> Tensor:
        """Return the gradient and drop the reference."""
        grad, self.grad = self.grad, None
        assert grad is not None
        return grad


def _deferred_row_gradient(x: Tensor, grad: Tensor, gathered: _Gathered, by_rows: bool) -> Tensor:
    """Return the gradient of the weight; `grad` is that of this rank's rows only."""
    return later_weight_gradient(x, gathered.take(), by_rows)


def _multiply_and_scatter(x: Tensor, weight: Tensor, chunks: Chunks) -> Tensor:
    like, matrix = x.new_empty((0, *x.shape[1:-1], weight.shape[0])), weight.t()

    def compute(rows: Rows, buffer: Tensor) -> object:
        return torch.mm(as_matrix(x[rows]), matrix, out=as_matrix(buffer))

    return start_scatter(chunks, like, compute)()


class _ScatterAdd(torch.autograd.Function):
    """The reduce-scatter over the group, plus a bias.

    The backward gathers the gradients of all rows, so the bias's gradient needs no separate
    message."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, scatter: ReduceScatter) -> Tensor:
        ctx.scatter, ctx.dtypes = scatter, (x.dtype, bias.dtype)
        return scatter(x) + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        dtype, bias_dtype = ctx.dtypes
        # the sum with the bias may be wider than x; cast before it is sent, so that fewer bytes are
        rows = apply(ctx.scatter.transposed(), grad.to(dtype))
        of_bias = as_matrix(rows).sum(0, dtype=bias_dtype) if ctx.needs_input_grad[1] else None
        return rows, of_bias, None


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias
