"""Column layers of one module that read one input: their products are one node of autograd.

While an entrance is open for an input, the first layer that gets it multiplies it by the weights of
all, and the others take their parts. The backward sums the gradient of the input over the group
once, while it computes those of the weights (column_product.py). A layer that gets another tensor
then makes a product of its own, whose gradient is summed too.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.parallel.tensor.column_product import column_products


class SharedEntrance:
    """The input that `layers` share, in the order in which they are called.

    layers: `nn.Linear`, or Conv1D of transformers, whose weight is (Din, Dout); each with a bias or
        none. Their forward becomes a `ColumnForward`.
    """

    def __init__(self, layers: Sequence[nn.Module], group: Group):
        self.layers, self.group = tuple(layers), group
        self._x: Tensor | None = None
        self._parts: dict[int, Tensor] = {}
        for index, layer in enumerate(layers):
            layer.__dict__["forward"] = ColumnForward(self, index)

    def open(self, x: object) -> bool:
        """Return whether layers sum the gradient of `x` from now on, so that nobody else has to.

        It stays closed in a forward that is not differentiated; under autocast, where gradients of
        several matmuls add up in the dtype of x and not in that of the matmuls; and in a graph of
        torch.compile, which keeps no tensors from one layer to the next.
        """
        if not isinstance(x, Tensor) or not (torch.is_grad_enabled() and x.requires_grad):
            return False
        if torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
            return False
        self._x = x
        return True

    def close(self) -> None:
        """Close the entrance after the module has returned or failed."""
        self._x = None
        self._parts.clear()

    def product(self, index: int, x: Tensor) -> Tensor:
        """x W^T + b of one of the layers."""
        layer = self.layers[index]
        if self._x is None:
            return type(layer).forward(layer, x)
        if x is self._x and not self._parts:
            self._multiply(x)
        if x is self._x and index in self._parts:
            return self._parts.pop(index)
        return column_products(x, *_factors((layer,)), self.group)[0]

    def _multiply(self, x: Tensor) -> None:
        self._parts = dict(enumerate(column_products(x, *_factors(self.layers), self.group)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.group, twin._x, twin._parts = self.group, None, {}
        twin.layers = deepcopy(self.layers, memo)
        return twin


@dataclass(frozen=True, slots=True)
class ColumnForward:
    """The forward of a layer whose product may be computed with those of others."""

    entrance: SharedEntrance
    index: int

    def __call__(self, x: Tensor) -> Tensor:
        return self.entrance.product(self.index, x)


def can_share(layers: Sequence[nn.Module]) -> bool:
    """Return whether the layers' forwards are matmuls that a `SharedEntrance` can take over."""
    kinds = {type(layer) for layer in layers}
    if len(kinds) != 1 or not all(k is nn.Linear or k.__name__ == "Conv1D" for k in kinds):
        return False
    has_bias = {layer._parameters.get("bias") is not None for layer in layers}
    weights = [layer._parameters.get("weight") for layer in layers]
    return len(has_bias) == 1 and all(
        weight is not None and weight.is_floating_point() and "forward" not in vars(layer)
        for weight, layer in zip(weights, layers, strict=True)
    )


def _factors(layers: Sequence[nn.Module]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights as (Dout, Din), and biases."""
    weights: list[Tensor] = []
    biases: list[Tensor | None] = []
    for layer in layers:
        weight, bias = layer._parameters["weight"], layer._parameters["bias"]
        assert weight is not None
        weights.append(weight if isinstance(layer, nn.Linear) else weight.t())
        biases.append(bias)
    return weights, biases
