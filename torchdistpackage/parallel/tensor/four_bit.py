"""Frozen weights of linear layers in 4 bits (QLoRA: Dettmers et al., arXiv:2305.14314).

bitsandbytes, of the extra `int8`, rounds and packs them. Each product unpacks its weight anew,
forward and backward, so that no pass keeps a wide one. Products are torch's own, in the type of x:
in float64 those of bitsandbytes are wrong.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.errors import ConfigError
from torchdistpackage.layout.four_bit import BLOCK_SIZE


def packed(weight: Tensor, quant_type: str) -> tuple[Tensor, Any]:
    """weight (Dout, Din) in 4 bits, two elements a byte, and what bitsandbytes knows of it.

    quant_type: nf4 or fp4. In float64 what its float32 is rounded to.

    Raises:
        ConfigError: bitsandbytes cannot do it on this device.
    """
    from bitsandbytes import __version__
    from bitsandbytes.functional import quantize_4bit

    wide = weight.detach().float() if weight.dtype == torch.float64 else weight.detach()
    try:
        return quantize_4bit(
            wide.contiguous(),
            blocksize=BLOCK_SIZE,
            compress_statistics=False,
            quant_type=quant_type,
        )
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"model.lora.load_in_4bit: bitsandbytes {__version__} packs no weights on "
            f"{weight.device.type} ({error}); install a build for it, or set load_in_4bit to false"
        ) from error


def unpacked(values: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    """The weight (Dout, Din) that was rounded."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(values, state).to(dtype)


class _ProductOfPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, state: Any) -> Tensor:
        ctx.save_for_backward(values)
        ctx.state = state
        return F.linear(x, unpacked(values, state, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (values,) = ctx.saved_tensors
        return grad @ unpacked(values, ctx.state, grad.dtype), None, None


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """`torch.nn.functional.linear` of x (..., Din) and a weight that `packed` made."""

    state: Any

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        y = _ProductOfPacked.apply(x, values, self.state)
        return y if bias is None else y + bias


class PackedLinear(nn.Module):
    """A whole linear layer that is to have, or has, a weight in 4 bits (`pack_weight`)."""

    product: PackedProduct

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def pack_weight(layer: Any, weight: Tensor, quant_type: str) -> None:
    """Let a `PackedLinear`, or a ColumnLinear or RowLinear, multiply by this weight (Dout, Din) in
    4 bits, which is a buffer from here on: no optimizer, sum or checkpoint knows it."""
    values, state = packed(weight, quant_type)
    del layer.weight
    layer.register_buffer("weight", values, persistent=False)
    layer.product = PackedProduct(state)
