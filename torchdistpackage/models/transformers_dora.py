"""The magnitudes of DoRA (Liu et al., arXiv:2402.09353) on layers that tensor ranks may share.

`Dora` takes the place of peft's layer of magnitudes, which knows neither of split layers nor of
weights in 4 bits: it needs the norm of each row of W + scaling B A, but a rank of a row layer has
only a part of every row.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.parallel.tensor import four_bit
from torchdistpackage.parallel.tensor.linear import RowLinear


class Dora(nn.Module):
    """The magnitude of each output of an adapted layer, with the forward of peft's DoraLinearLayer.

    fan_in_fan_out: the layer's weight is stored as (Din, Dout), as that of transformers' Conv1D.
    """

    def __init__(self, outputs: int, fan_in_fan_out: bool, dtype: torch.dtype):
        super().__init__()
        self.fan_in_fan_out = fan_in_fan_out
        self.weight = nn.Parameter(torch.empty(outputs, dtype=dtype, device="meta"))

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Module,
        lora_B: nn.Module,
        scaling: float,
        base_layer: Any,
        base_result: Tensor | None = None,
        adapter_name: str = "",
    ) -> Tensor:
        """Return what the adapter adds to the result of `base_layer` (..., Dout).

        base_result: that result; None: x has other values than it was made of, after a dropout.
        """
        rows = self._rows(base_layer, x.dtype)
        norms = self._norms(rows, lora_A, lora_B, scaling, base_layer)
        scale = self.weight / norms
        if base_result is None:
            base_result = F.linear(x, rows)
        elif not _adds_bias_later(base_layer) and base_layer.bias is not None:
            base_result = base_result - base_layer.bias
        return (scale - 1) * base_result + scale * lora_B(lora_A(x)) * scaling

    @torch.no_grad()
    def reset(self, lora: Any) -> None:
        """Set the magnitudes to the norms of the rows of the weight of peft's layer `lora`, as an
        adapter starts that adds nothing.
        """
        base_layer = lora.get_base_layer()
        rows = self._rows(base_layer, self.weight.dtype)
        self.weight.copy_(_row_norms(rows, _sharing_group(base_layer)))

    def _rows(self, base_layer: Any, dtype: torch.dtype) -> Tensor:
        """Return the weight of a layer on this rank as (Dout, Din)."""
        product = getattr(base_layer, "product", None)
        if isinstance(product, four_bit.PackedProduct):
            return four_bit.unpacked(base_layer.weight, product.state, dtype)
        # in the dtype of the trained lengths, which are divided by the norms of these rows
        weight: Tensor = base_layer.weight.to(dtype)
        return weight.t() if self.fan_in_fan_out else weight

    @torch.no_grad()  # a constant to the gradient, section 4.3 of the paper
    def _norms(
        self, rows: Tensor, lora_A: Any, lora_B: Any, scaling: float, base_layer: Any
    ) -> Tensor:
        update = lora_B.weight @ lora_A.weight
        return _row_norms(rows + scaling * update.to(rows.dtype), _sharing_group(base_layer))


def _sharing_group(base_layer: Any) -> Group | None:
    """Return the ranks that each have a part of every row of a layer's weight, if there are any."""
    return base_layer.group if isinstance(base_layer, RowLinear) else None


def _adds_bias_later(base_layer: Any) -> bool:
    """Return whether the bias is added behind the sum over ranks, and not by the layer."""
    return isinstance(base_layer, RowLinear) and base_layer.local


def _row_norms(rows: Tensor, group: Group | None) -> Tensor:
    # the squares of a long row lose their small ones when they are added in bf16
    wide = rows if rows.dtype == torch.float64 else rows.float()
    if group is None:
        return torch.linalg.vector_norm(wide, dim=1).to(rows.dtype)
    squares = primitives.all_reduce(wide.square().sum(dim=1), group)
    return squares.sqrt().to(rows.dtype)


def reset_magnitudes(model: nn.Module) -> None:
    """Set the magnitudes of all adapters of `model` to the norms of what they adapt."""
    for layer in model.modules():
        magnitudes: Any = getattr(layer, "lora_magnitude_vector", None)
        if magnitudes is not None:
            for magnitude in magnitudes.values():
                magnitude.reset(layer)
