"""Products of a tensor-parallel layer, whose communication runs while they compute.

Two nodes of autograd stand where a column product meets other ranks: one brings the input together,
one multiplies. In the backward the second computes the input's gradient, begins to sum it over the
group, computes the gradients of the weights meanwhile, and leaves the waiting to the first. With
`overlap` the forward's gather, and both ends of a row product, run in chunks as well. Megatron-LM
does the first by default and calls the second tp_comm_overlap.

Where a gradient of a gradient is asked for, the backward is made of differentiable operations, and
nothing overlaps. The pipeline's split backward knows the node: see deferred_wgrad.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.autograd import (
    AllGather,
    IdentityForward,
    LinearMap,
    Reduce,
    ReduceScatter,
    apply,
)
from torchdistpackage.comm.primitives import Group, Sizes, check_sizes
from torchdistpackage.parallel.tensor.chunked import (
    Chunks,
    Coming,
    Handoff,
    Rows,
    num_chunks_of,
    start_gather,
    start_scatter,
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
        return _multiply(x, weights, biases)
    sizes = check_sizes(x, 0, sizes, group, cut=False) if sequence_parallel else None
    x, weights, biases = _autocast(x, weights, biases)
    ends = _Ends(len(weights), Handoff(), Coming())
    plain: LinearMap = IdentityForward(group)
    if sequence_parallel:
        plain = AllGather(group, 0, sizes)
        lengths = sizes or (x.shape[0],) * group.size()
        num_chunks = num_chunks_of(lengths, _row_bytes(x)) if overlap else 1
        if overlap:
            ends.chunks = Chunks.of(lengths, num_chunks, group)
    into = _Entry(plain, ends.sent, ends.chunks, ends.coming)
    ends.send = plain.transposed()
    return _product(apply(into, x), ends, weights, biases)


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
    lengths = sizes or (x.shape[0] // group.size(),) * group.size()
    row_bytes = _row_bytes(x) // max(x.shape[-1], 1) * weight.shape[0]
    ends = _Ends(1, Handoff(), Coming(), scatters=True)
    ends.chunks = Chunks.of(lengths, num_chunks_of(lengths, row_bytes), group)
    out_of = _Exit(plain, ends.sent, ends.chunks, ends.coming)
    y = apply(out_of, _product(x, ends, (weight,), ()))
    return _plus(y, None if bias is None else apply(IdentityForward(group), bias))


@dataclass(slots=True, eq=False)
class _Ends:
    """What a product does where it meets other ranks, in one forward and its backwards.

    sent: what the product began to send, of its result or of the gradient of x. coming: what it
    waits for, x or the gradient of its result. chunks: None: in one piece. scatters: the result is
    summed and scattered, as of a row product. send: the map of a gradient in one piece.
    """

    num_weights: int
    sent: Handoff
    coming: Coming
    chunks: Chunks | None = None
    scatters: bool = False
    send: LinearMap | None = None


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
class _Entry:
    """The input of a column product, as `plain` makes it, or begun in chunks."""

    plain: LinearMap
    sent: Handoff
    chunks: Chunks | None
    coming: Coming

    @property
    def group(self) -> Group:
        return self.plain.group

    def __call__(self, x: Tensor) -> Tensor:
        if self.chunks is None:
            return self.plain(x)
        self.coming.arrivals = start_gather(x, self.chunks)
        return self.coming.arrivals.into

    def transposed(self) -> LinearMap:
        return _Begun(self.plain.transposed(), self.sent)


@dataclass(frozen=True, slots=True)
class _Exit:
    """The result of a row product, of which the product sends a chunk once it has computed it."""

    plain: LinearMap
    sent: Handoff
    chunks: Chunks
    coming: Coming

    @property
    def group(self) -> Group:
        return self.plain.group

    def __call__(self, x: Tensor) -> Tensor:
        return _Begun(self.plain, self.sent)(x)

    def transposed(self) -> LinearMap:
        return _Entry(self.plain.transposed(), Handoff(), self.chunks, self.coming)


def _product(
    x: Tensor, ends: _Ends, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Tensor:
    given = [b for b in biases if b is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights, *given)):
        return _Product.apply(x, ends, *weights, *given)
    return _forward(x, ends, weights, given)


def _forward(x: Tensor, ends: _Ends, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    arrivals = ends.coming.take()
    if arrivals is None and not ends.scatters:
        return _multiply(x, weights, biases)
    width = sum(weight.shape[0] for weight in weights)
    if ends.scatters:
        assert ends.chunks is not None
        like = x.new_empty((0, *x.shape[1:-1], width))
        matrix = weights[0].t()

        def compute(rows: Rows, into: Tensor) -> object:
            return torch.mm(_flat(x[rows]), matrix, out=_flat(into))

        ends.sent.finish = start_scatter(ends.chunks, like, compute)
        return x.new_zeros(()).expand(*x.shape[:-1], width)  # of the shape; nobody reads it
    assert arrivals is not None
    y = x.new_empty((*x.shape[:-1], width))
    for rows in arrivals:
        y[rows] = _multiply(x[rows], weights, biases)
    return y


class _Product(torch.autograd.Function):
    """x (S, ..., Din) and weights, then biases, to their products side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: _Ends, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[: ends.num_weights], parameters[ends.num_weights :]
        ctx.save_for_backward(x, *weights)
        ctx.ends, ctx.widths = ends, [weight.shape[0] for weight in weights]
        ctx.places = _places(weights, len(biases))
        return _forward(x, ends, weights, biases)

    @staticmethod
    def deferred_gradient(node: Any, argument: int) -> tuple[Any, ...]:
        """How `deferred_wgrad` has that of parameter number `argument`, from 1, computed later."""
        return parameter_gradient, *node.places[argument - 1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        ends: _Ends = ctx.ends
        wanted = _wanted(ctx)
        dx = None
        if torch.is_grad_enabled():
            if (arrivals := ends.coming.take()) is not None:
                arrivals.whole()
            if wanted[0]:
                dx = _input_gradient(grad, weights, ctx.widths)
        else:
            dx = _send_input_gradient(grad, x, weights, ctx, wanted[0])
        grads = [
            parameter_gradient(x, grad, *where) if is_wanted else None
            for where, is_wanted in zip(ctx.places, wanted[1:], strict=True)
        ]
        return dx, None, *grads


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
        of_bias = _flat(rows).sum(0, dtype=bias_dtype) if ctx.needs_input_grad[1] else None
        return rows, of_bias, None


def _wanted(ctx: Any) -> list[bool]:
    """For x and each parameter whether its gradient is, in this backward."""
    static = [ctx.needs_input_grad[0], *ctx.needs_input_grad[2:]]
    found: list[bool] = []
    for needs, (node, _) in zip(static, ctx.next_functions, strict=True):
        try:
            found.append(needs and node is not None and torch._C._will_engine_execute_node(node))
        except RuntimeError:  # torch.autograd.grad with leaves does not say
            found.append(needs)
    return found


def _places(weights: Sequence[Tensor], num_biases: int) -> list[tuple[int, int, bool, bool]]:
    """Of each parameter its part of the result's last dim, whether it is a bias, and whether its
    memory is by columns, as autograd then wants the gradient of a weight."""
    found: list[tuple[int, int, bool, bool]] = []
    for is_bias in (False, True):
        start = 0
        for weight in weights:
            by_columns = weight.stride(0) == 1 and weight.stride(1) == weight.shape[0]
            found.append((start, weight.shape[0], is_bias, by_columns))
            start += weight.shape[0]
    return found[: len(weights) + num_biases]


def parameter_gradient(
    x: Tensor, grad: Tensor, start: int, width: int, is_bias: bool, by_columns: bool
) -> Tensor:
    """Of the weight, or bias, behind columns [start, start + width) of a product of x."""
    part = _flat(grad.narrow(-1, start, width))
    if is_bias:
        return part.sum(0)
    flat = _flat(x)
    return flat.t().mm(part).t() if by_columns else part.t().mm(flat)


def _send_input_gradient(
    grad: Tensor, x: Tensor, weights: Sequence[Tensor], ctx: Any, is_wanted: bool
) -> Tensor | None:
    """The gradient of x, or a stand-in for one whose sum over the group is under way."""
    ends: _Ends = ctx.ends
    if (arrivals := ends.coming.take()) is not None:  # of a row product
        dx = x.new_empty(x.shape) if is_wanted else None
        for rows in arrivals:
            if dx is not None:
                dx[rows] = _input_gradient(grad[rows], weights, ctx.widths)
        return dx
    if not is_wanted:
        return None
    if ends.send is None:
        return _input_gradient(grad, weights, ctx.widths)
    if ends.chunks is not None:

        def compute(rows: Rows, into: Tensor) -> object:
            return into.copy_(_input_gradient(grad[rows], weights, ctx.widths))

        ends.sent.finish = start_scatter(ends.chunks, x[:0], compute)
    else:
        partial = _input_gradient(grad, weights, ctx.widths)
        if isinstance(ends.send, ReduceScatter):
            work = primitives.reduce_scatter(partial, ends.send.group, ends.send.sizes, True)
        else:
            work = primitives.all_reduce(partial, ends.send.group, async_op=True)
        ends.sent.finish = work.wait
    return x.new_zeros(()).expand(x.shape)  # of the shape; the node before it has the sum


def _multiply(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Tensor:
    """All products, in one tensor."""
    if len(weights) == 1:
        return F.linear(x, weights[0], biases[0] if biases else None)
    given = biases or (None,) * len(weights)
    return torch.cat([F.linear(x, w, b) for w, b in zip(weights, given, strict=True)], -1)


def _input_gradient(grad: Tensor, weights: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """Gradient of x, by which all weights were multiplied."""
    parts = grad.split(list(widths), -1)
    total = parts[0] @ weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total = total + part @ weight
    return total


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


def _row_bytes(x: Tensor) -> int:
    return x.itemsize * prod(x.shape[1:])


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
