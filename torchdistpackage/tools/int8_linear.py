"""Replacement of nn.Linear by int8 layers of bitsandbytes, bminf, or torch itself (on the CPU).

All three are for inference with fixed weights. They leave layers that are int8 already, and the
output projection of nn.MultiheadAttention, because that module reads the layer's weight itself.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from torchdistpackage.tools.module_replace import replace_all_module
from torchdistpackage.tools.nested import as_module

_BNB_KWARGS = {"has_fp16_weights": False, "threshold": 6.0}


def replace_linear_by_bnb(
    model: nn.Module, bnb_kwargs: Mapping[str, Any] = _BNB_KWARGS
) -> nn.Module:
    """Replace every nn.Linear by bitsandbytes' `Linear8bitLt(..., **bnb_kwargs)`, on its own
    device.

    With `has_fp16_weights=False` weights are quantised here on any device: later `.to()` calls
    keep int8. Returns the model, or the new layer where the model is one itself.

    Raises:
        ImportError: bitsandbytes is not installed.
    """
    try:
        from bitsandbytes.nn import Linear8bitLt
    except ImportError as error:
        raise _missing("bitsandbytes", "replace_linear_by_bnb", error) from error

    def make(name: str, old: nn.Linear) -> nn.Module:
        new = Linear8bitLt(
            old.in_features, old.out_features, bias=old.bias is not None, **bnb_kwargs
        )
        new.load_state_dict(old.state_dict())
        if new.bias is not None:
            new.bias.data = new.bias.data.to(old.bias.dtype)
        return new.to(old.weight.device)  # quantises

    return _replace(model, make, Linear8bitLt)


def replace_linear_by_bminf(model: nn.Module) -> nn.Module:
    """Replace every nn.Linear by bminf's `QuantizedLinear(layer)`, and return the model as above.

    Raises:
        ImportError: bminf is not installed.
    """
    try:
        from bminf import QuantizedLinear
    except ImportError as error:
        raise _missing("bminf", "replace_linear_by_bminf", error) from error
    return _replace(model, lambda name, old: QuantizedLinear(old), QuantizedLinear)


def replace_linear_by_int8(model: nn.Module) -> nn.Module:
    """Replace every nn.Linear by an `Int8Linear`: torch's own quantised matmul, on the CPU.

    Raises:
        TypeError: the model is not a module.
        ValueError: a layer is not on the CPU, or has no real weights; nothing is replaced.
    """
    layers = [
        (name or "the model", module.weight)
        for name, module in as_module(model, "replace_linear_by_int8").named_modules()
        if isinstance(module, nn.Linear)
    ]
    if away := [f"{name} on {w.device}" for name, w in layers if w.device.type != "cpu"]:
        raise ValueError(
            f"replace_linear_by_int8: {len(away)} layers are not on the CPU ({away[0]}), where "
            f"torch's quantised matmul runs; move the model, or use replace_linear_by_bnb"
        )
    if unreal := [f"{name}: {w.dtype}" for name, w in layers if not w.is_floating_point()]:
        raise ValueError(
            f"replace_linear_by_int8: {len(unreal)} layers have no real weights ({unreal[0]}); "
            f"replace the others alone, by replace_all_module and Int8Linear"
        )
    return _replace(model, lambda name, old: Int8Linear(old), Int8Linear)


class Int8Linear(nn.Module):
    """A linear layer y = x W^T + b with W (Dout, Din) in int8, one scale for each row.

    x (..., Din) floating point, y (..., Dout) of x's dtype; x is rounded to 8 bits a call. The
    product is torch's dynamic quantised linear. No gradients; `state_dict` holds int8 and scales.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # float32, so that neither the scale nor the quotient is rounded before the cut to 8 bits
        full = linear.weight.detach().float()
        scale = (full.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        self.register_buffer("weight", (full / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        # the operator takes a bias of float32 alone
        bias = None if linear.bias is None else linear.bias.detach().float()
        self.register_buffer("bias", bias)
        self._packed: tuple[tuple[int, ...], Any] | None = None
        self.train(linear.training)

    def forward(self, x: Tensor) -> Tensor:
        packed = self._pack()
        # the operator takes float32 alone; reduce_range keeps the 16-bit sums of FBGEMM's x86
        # kernels from overflowing
        return torch.ops.quantized.linear_dynamic(x.float(), packed, reduce_range=True).to(x.dtype)

    def dequantized(self) -> Tensor:
        """Return the weights (Dout, Din) that the matmul uses, in float32."""
        return self.weight * self.scale[:, None]

    def extra_repr(self) -> str:
        has_bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}"

    def _pack(self) -> Any:
        """Return torch's packed form of the weights, packed again if a buffer has changed."""
        buffers = [x for x in (self.weight, self.scale, self.bias) if x is not None]
        versions = tuple(n for x in buffers for n in (x.data_ptr(), x._version))
        if self._packed is None or self._packed[0] != versions:
            zero = torch.zeros(self.out_features, dtype=torch.long)
            with warnings.catch_warnings():
                # torch plans to replace the tensor type, not the product
                warnings.filterwarnings("ignore", message=".*quantize.*deprecated", module="torch")
                warnings.simplefilter("ignore", UserWarning)
                # as torch keeps scales of quantized tensors
                w = torch._make_per_channel_quantized_tensor(
                    self.weight, self.scale.double(), zero, 0
                )
                self._packed = versions, torch.ops.quantized.linear_prepack(w, self.bias)
        return self._packed[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}  # torch can neither copy nor pickle it


def _replace(model: nn.Module, make: Callable[..., nn.Module], int8: type) -> nn.Module:
    """Replace every nn.Linear that is not int8 yet, and keep its mode."""
    keep = (NonDynamicallyQuantizableLinear, int8)

    def picks(name: str, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and not isinstance(module, keep)

    def makes(name: str, module: nn.Module) -> nn.Module:
        return make(name, module).train(module.training)

    return replace_all_module(model, picks, makes)


def _missing(package: str, used_by: str, error: ImportError) -> ImportError:
    """Return the error for a package that cannot be imported."""
    return ImportError(
        f"{used_by} needs {package}, which cannot be imported ({error}); pip install {package}, "
        f"or use replace_linear_by_int8, which needs torch alone"
    )
