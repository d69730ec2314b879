"""Products of several weights with one input, and the gradients of each factor.

Free of communication and of autograd's nodes: products.py makes nodes of them.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Product = Callable[..., Tensor]
"""Of x, weight and bias, as `torch.nn.functional.linear`."""


def multiply(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    product: Product = F.linear,
) -> Tensor:
    """All products, in one tensor."""
    if len(weights) == 1:
        return product(x, weights[0], biases[0] if biases else None)
    given = biases or (None,) * len(weights)
    return torch.cat([product(x, w, b) for w, b in zip(weights, given, strict=True)], -1)


def input_gradient(grad: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Gradient of x, by which all weights were multiplied."""
    if len(weights) == 1:
        return grad @ weights[0]
    parts = grad.split([len(weight) for weight in weights], -1)
    total = parts[0] @ weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total = total + part @ weight
    return total


def is_wanted(ctx: Any, first: int) -> list[bool]:
    """For x and each parameter whether its gradient is, in this backward. The parameters are the
    node's arguments from number `first` on; those between are no tensors."""
    needed = (ctx.needs_input_grad[0], *ctx.needs_input_grad[first:])
    found: list[bool] = []
    for needs, (node, _) in zip(needed, ctx.next_functions, strict=True):
        try:
            found.append(needs and node is not None and torch._C._will_engine_execute_node(node))
        except RuntimeError:  # torch.autograd.grad with leaves does not say
            found.append(needs)
    return found


def places_of(weights: Sequence[Tensor], num_biases: int) -> list[tuple[int, int, bool, bool]]:
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
    part = as_matrix(grad if width == grad.shape[-1] else grad.narrow(-1, start, width))
    if is_bias:
        return part.sum(0)
    rows = as_matrix(x)
    return rows.t().mm(part).t() if by_columns else part.t().mm(rows)


def as_matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def row_bytes(x: Tensor) -> int:
    return x.itemsize * prod(x.shape[1:])
