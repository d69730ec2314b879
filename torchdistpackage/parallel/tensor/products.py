"""Products of a tensor-parallel layer, whose communication runs while they compute.

A column product is one node of autograd: its backward computes the input's gradient, begins to sum
it over the group, and computes the gradients of the weights meanwhile. With `overlap` every gather
and reduce-scatter runs in chunks (chunked.py), between which the product computes, and a row
product is one node as well. Megatron-LM does the first by default and calls the second
tp_comm_overlap.

Where a gradient of a gradient is asked for, the backward is made of differentiable operations, and
nothing overlaps. The pipeline's split backward knows the node: see deferred_wgrad.py. In a graph
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
    input_gradient,
    is_wanted,
    multiply,
    parameter_gradient,
    places_of,
    row_bytes,
)


def column_product(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
    sequence_parallel: bool = False,
    sizes: Sizes | None = None,
    overlap: bool = False,
    product: Product = F.linear,
) -> Tensor:
    """[x W^T + b] of each of the weights, side by side in the last dim.

    x (S, ..., Din), or (S/n, ..., Din) under sequence parallelism; weights (Dout/n, Din), biases
    (Dout/n,), both of all weights or of none; result (S, ..., sum of Dout/n). The gradient of x is
    summed over the group. sizes: under sequence parallelism the length of each rank's x, where they
    differ. product: another one than torch's, which nothing overlaps.
    """
    if group.size() == 1:
        return multiply(x, weights, biases, product)
    sizes = check_sizes(x, 0, sizes, group, cut=False) if sequence_parallel else None
    x, weights, biases = _autocast(x, weights, biases)
    given = [b for b in biases if b is not None]
    into = AllGather(group, 0, sizes) if sequence_parallel else IdentityForward(group)
    if product is not F.linear or is_traced():
        return multiply(apply(into, x), weights, biases, product)
    chunks = None
    if overlap and sequence_parallel:
        lengths = sizes or (x.shape[0],) * group.size()
        chunks = Chunks.of(lengths, num_chunks_of(lengths, row_bytes(x)), group)
    if torch.is_grad_enabled():
        return _ColumnProduct.apply(x, into, chunks, len(weights), *weights, *given)[0]
    return _multiply_into(x, into, chunks, weights, given)[0]


def column_products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], group: Group
) -> tuple[Tensor, ...]:
    """x W^T + b of each of the weights, each a tensor of its own, of one node of autograd.

    x (..., Din); weights (Dout/n, Din), biases (Dout/n,), both of all weights or of none. The
    gradient of x is summed over the group once, for all products.
    """
    given = [b for b in biases if b is not None]
    return _ColumnProducts.apply(x, group, len(weights), *weights, *given)


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
    """x W^T summed over the group, from each rank's columns of x, and then the bias.

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
    x, (weight,), _ = _autocast(x, (weight,), ())
    lengths = sizes or (x.shape[0] // group.size(),) * group.size()
    num_bytes = row_bytes(x) // max(x.shape[-1], 1) * weight.shape[0]  # of a row of the result
    chunks = Chunks.of(lengths, num_chunks_of(lengths, num_bytes), group)
    if torch.is_grad_enabled():
        y = _RowProduct.apply(x, plain, chunks, weight)
    else:
        y = _multiply_and_scatter(x, weight, chunks)
    return _plus(y, None if bias is None else apply(IdentityForward(group), bias))


class _ColumnProduct(torch.autograd.Function):
    """x as a map brings it together, and its products with the weights side by side.

    chunks: in which x comes and its gradient goes, or None. The second result, x brought together,
    is there for gradients of gradients alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        into: AllGather | IdentityForward,
        chunks: Chunks | None,
        num_weights: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        weights, biases = parameters[:num_weights], parameters[num_weights:]
        y, whole = _multiply_into(x, into, chunks, weights, biases)
        ctx.save_for_backward(whole, *weights)
        ctx.set_materialize_grads(False)
        ctx.into, ctx.chunks, ctx.places = into, chunks, places_of(weights, len(biases))
        return y, whole

    @staticmethod
    def deferred_gradient(node: Any, argument: int) -> tuple[Any, ...]:
        """How `deferred_wgrad` has that of parameter number `argument`, from 1, computed later."""
        return 0, parameter_gradient, *node.places[argument - 1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_whole: Tensor | None) -> tuple[Any, ...]:
        whole, *weights = ctx.saved_tensors
        for_x, *for_parameters = is_wanted(ctx, 4)
        dx, finish = None, None
        if for_x and torch.is_grad_enabled():
            dx = of_whole
            if grad is not None:
                dx = input_gradient(grad, weights)
                dx = dx if of_whole is None else dx + of_whole
            dx = None if dx is None else apply(ctx.into.transposed(), dx)
        elif for_x and (grad is not None or of_whole is not None):
            finish = _start_sum(grad, of_whole, weights, whole, ctx.into, ctx.chunks)
        grads = [
            parameter_gradient(whole, grad, *place) if wanted and grad is not None else None
            for place, wanted in zip(ctx.places, for_parameters, strict=True)
        ]
        if finish is not None:
            dx = finish()
        return dx, None, None, None, *grads


class _ColumnProducts(torch.autograd.Function):
    """x times each weight. The gradient of x is summed while those of the weights are computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, num_weights: int, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:num_weights], parameters[num_weights:]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        ctx.group = group
        ctx.places = [place for w in weights for place in places_of((w,), 0)]
        ctx.places += [(0, len(bias), True, False) for bias in biases]
        given = biases or (None,) * num_weights
        return tuple(multiply(x, (w,), (b,)) for w, b in zip(weights, given, strict=True))

    @staticmethod
    def deferred_gradient(node: Any, argument: int) -> tuple[Any, ...]:
        """As of a `_ColumnProduct`; each weight, and its bias, has a result of its own."""
        num_weights = len(node.saved_tensors) - 1
        return (argument - 1) % num_weights, parameter_gradient, *node.places[argument - 1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        for_x, *for_parameters = is_wanted(ctx, 3)
        dx, finish = None, None
        if for_x:
            # The last product first: so autograd adds the gradients of an input that layers read
            # one after another, and a sum of floating-point numbers depends on its order.
            for grad, weight in zip(grads[::-1], weights[::-1], strict=True):
                if grad is not None:
                    part = input_gradient(grad, (weight,))
                    dx = part if dx is None else dx + part
        if dx is not None and torch.is_grad_enabled():
            dx = apply(Reduce(ctx.group), dx)
        elif dx is not None:
            finish = primitives.all_reduce(dx, ctx.group, async_op=True).wait
        arriving = grads * 2  # those of the weights, and of the biases
        of_parameters = [
            parameter_gradient(x, grad, *place) if wanted and grad is not None else None
            for grad, place, wanted in zip(arriving, ctx.places, for_parameters, strict=False)
        ]
        if finish is not None:
            dx = finish()
        return dx, None, None, *of_parameters


def _multiply_into(
    x: Tensor,
    into: AllGather | IdentityForward,
    chunks: Chunks | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """The products side by side, and x as `into` brings it together."""
    if chunks is None:
        whole = into(x)
        return multiply(whole, weights, biases), whole
    arrivals = start_gather(x, chunks)
    whole = arrivals.into
    y = x.new_empty((*whole.shape[:-1], sum(weight.shape[0] for weight in weights)))
    for rows in arrivals:
        y[rows] = multiply(whole[rows], weights, biases)
    return y, whole


def _start_sum(
    grad: Tensor | None,
    of_whole: Tensor | None,
    weights: Sequence[Tensor],
    like: Tensor,
    into: AllGather | IdentityForward,
    chunks: Chunks | None,
) -> Callable[[], Tensor]:
    """Begin the sum over the group of the gradients of what `into` made; to be called for it.

    grad, of_whole: the gradients of the products, and one that came to `into`'s result itself.
    like: of the shape and dtype of that result.
    """

    def gradient(rows: Rows) -> Tensor:
        if grad is None:
            assert of_whole is not None
            return of_whole[rows]
        dx = input_gradient(grad[rows], weights)
        return dx if of_whole is None else dx + of_whole[rows]

    if chunks is not None:
        return start_scatter(chunks, like[:0], lambda rows, buffer: buffer.copy_(gradient(rows)))
    dx = gradient(slice(None))
    if isinstance(into, AllGather):
        return primitives.reduce_scatter(dx, into.group, into.sizes, async_op=True).wait
    return primitives.all_reduce(dx, into.group, async_op=True).wait


class _RowProduct(torch.autograd.Function):
    """My rows of the sum over the group of x W^T; both ways the rows travel in `chunks`.

    A deferred gradient of W needs the gradient of all rows, which this backward brings together.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scatter: ReduceScatter, chunks: Chunks, weight: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scatter, ctx.chunks = scatter, chunks
        ctx.gathered, (ctx.place,) = _Gathered(), places_of((weight,), 0)
        return _multiply_and_scatter(x, weight, chunks)

    @staticmethod
    def deferred_gradient(node: Any, argument: int) -> tuple[Any, ...]:
        """How `deferred_wgrad` has that of the weight computed later."""
        node.gathered.is_awaited = True
        return 0, _deferred_row_gradient, node.gathered, node.place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight = is_wanted(ctx, 3)
        if torch.is_grad_enabled():
            whole = apply(ctx.scatter.transposed(), grad)
            dx = input_gradient(whole, (weight,)) if for_x else None
        else:
            arrivals = start_gather(grad, ctx.chunks)
            whole, dx = arrivals.into, x.new_empty(x.shape) if for_x else None
            for rows in arrivals:
                if dx is not None:
                    dx[rows] = input_gradient(whole[rows], (weight,))
        if ctx.gathered.is_awaited:
            ctx.gathered.grad = whole
        of_weight = parameter_gradient(x, whole, *ctx.place) if for_weight else None
        return dx, None, None, of_weight


class _Gathered:
    """The gradient of all rows of a row product, kept where that of its weight comes later."""

    def __init__(self) -> None:
        self.is_awaited = False
        self.grad: Tensor | None = None

    def take(self) -> Tensor:
        """The gradient, once."""
        grad, self.grad = self.grad, None
        assert grad is not None
        return grad


def _deferred_row_gradient(
    x: Tensor, grad: Tensor, gathered: _Gathered, place: tuple[int, int, bool, bool]
) -> Tensor:
    """Of the weight; `grad` is that of this rank's rows alone."""
    return parameter_gradient(x, gathered.take(), *place)


def _multiply_and_scatter(x: Tensor, weight: Tensor, chunks: Chunks) -> Tensor:
    like, matrix = x.new_empty((0, *x.shape[1:-1], weight.shape[0])), weight.t()

    def compute(rows: Rows, buffer: Tensor) -> object:
        return torch.mm(as_matrix(x[rows]), matrix, out=as_matrix(buffer))

    return start_scatter(chunks, like, compute)()


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
