"""Matmuls of several weights with one input, and the gradients of each factor.

It contains neither communication nor autograd nodes; column_product.py and row_product.py add
these.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[..., Tensor]
"""A function of x, weight and bias, like `torch.nn.functional.linear`."""


def multiply(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    product: Product = F.linear,
) -> list[Tensor]:
    """Multiply x by each weight; return the results."""
    return [product(x, w, b) for w, b in zip(weights, biases, strict=True)]


def input_gradient(
    grads: Sequence[Tensor | None], weights: Sequence[Tensor], other: Tensor | None = None
) -> Tensor | None:
    """Return the gradient of x, the input of all weights, plus another one; None: there is none.

    The last matmul comes first, because autograd adds the gradients of an input read by several
    layers in that order, and a sum of floating-point numbers depends on its order.
    """
    total = other
    for grad, weight in zip(reversed(grads), reversed(weights), strict=True):
        if grad is not None:
            part = grad @ weight
            total = part if total is None else total + part
    return total


def autocast(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor | None]]:
    """Return the tensors in the dtype that matmuls use under autocast."""
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(t: Tensor) -> Tensor:
        # as torch's autocast, which leaves float64 alone
        return t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t

    return cast(x), [cast(w) for w in weights], [b if b is None else cast(b) for b in biases]


def is_wanted(ctx: Any) -> list[bool]:
    """Return for each argument of the node whether this backward needs its gradient."""
    will_run, nodes = torch._C._will_engine_execute_node, [node for node, _ in ctx.next_functions]
    try:
        return [node is not None and will_run(node) for node in nodes]
    except RuntimeError:  # torch.autograd.grad with leaves does not say
        return [node is not None and _may_run(node) for node in nodes]


def _may_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True


def parameter_gradients(
    x: Tensor,
    grads: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of the weights that multiplied x, then of the biases, if any.

    grads: of the results. needs_grad: whether each weight and bias needs one.
    """
    rows, of_weights, of_biases = as_matrix(x), list[Tensor | None](), list[Tensor | None]()
    for_biases = needs_grad[len(weights) :] or (False,) * len(weights)
    for grad, weight, for_weight, for_bias in zip(
        grads, weights, needs_grad, for_biases, strict=False
    ):
        part = None if grad is None else as_matrix(grad)
        of_weights.append(
            weight_gradient(rows, part, weight.is_contiguous())
            if for_weight and part is not None
            else None
        )
        of_biases.append(part.sum(0) if for_bias and part is not None else None)
    return of_weights if len(needs_grad) == len(weights) else of_weights + of_biases


def deferred(node: Any, argument: int, first: int) -> tuple[Any, ...]:
    """Return how to compute the gradient of parameter number `argument`, from 1, later.

    The node has saved x and its weights. The result is the number of the matmul whose gradient is
    needed, a formula of x and that gradient, and its options.

    first: number of the first matmul among the results.
    """
    weights = node.saved_tensors[1:]
    number = (argument - 1) % len(weights)
    if argument > len(weights):
        return first + number, _later_bias_gradient
    return first + number, later_weight_gradient, weights[number].is_contiguous()


def weight_gradient(rows: Tensor, grad: Tensor, by_rows: bool) -> Tensor:
    """Return the gradient of a weight from rows (N, Din) and the gradient of the matmul (N, Dout).

    by_rows: memory order of the weight, in which autograd computes its gradient.
    """
    return grad.t().mm(rows) if by_rows else rows.t().mm(grad).t()


def later_weight_gradient(x: Tensor, grad: Tensor, by_rows: bool) -> Tensor:
    """Return the same gradient for tensors of any number of dims."""
    return weight_gradient(as_matrix(x), as_matrix(grad), by_rows)


def _later_bias_gradient(x: Tensor, grad: Tensor) -> Tensor:
    return as_matrix(grad).sum(0)


def as_matrix(x: Tensor) -> Tensor:
    """Return x as a matrix of its rows along the last dim."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def row_bytes(x: Tensor) -> int:
    return x.itemsize * prod(x.shape[1:])
