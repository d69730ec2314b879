"""Matmuls of linear layers in float8, with a scale for each row of either factor.

The row-wise recipe of torchao: x, the weight and the gradient are rounded to e4m3 (Micikevicius et
al., arXiv:2209.05433) after each row of a factor was scaled to its largest element, for the product
of the forward and that of x's gradient; the weight's gradient, which adds up over all tokens, is
multiplied in the precision of activations. On a GPU the product is `torch._scaled_mm`; elsewhere
the same rounded numbers are multiplied in float32.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.errors import ConfigError
from torchdistpackage.parallel.tensor.linear import Linear

E4M3 = torch.float8_e4m3fn
MULTIPLE = 16
"""Number that must divide both features of a rank's weight, as GPUs require."""
CAPABILITY = (8, 9)
"""The first compute capability with float8: Ada, later Hopper."""


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round the rows of x (M, K) to e4m3; return them with factors (M, 1), float32, that scale them
    back.
    """
    # float32, so that the factor itself is not rounded to the few bits of bf16
    largest = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
    factor = largest / torch.finfo(E4M3).max
    return (x.float() / factor).to(E4M3), factor


def scaled_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a (M, K) times b (N, K) transposed, both rounded by rows: (M, N), in the dtype of
    a.
    """
    (first, of_a), (second, of_b) = rounded_rows(a), rounded_rows(b)
    if a.is_cuda:
        out = torch._scaled_mm(
            first,
            second.t(),
            scale_a=of_a,
            scale_b=of_b.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return out.to(a.dtype)
    # a CPU has no float8 matmul; float32 adds up without further rounding, as a GPU does
    return ((first.float() @ second.float().t()) * of_a * of_b.t()).to(a.dtype)


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return scaled_product(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight = ctx.needs_input_grad
        of_x = scaled_product(grad, weight.t().contiguous()) if for_x else None
        return of_x, grad.t() @ x if for_weight else None


def float8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear` of x (..., Din) and weight (Dout, Din), both rounded by
    rows.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        # a custom function is not seen by autocast, which would cast the matmul of nn.Linear
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    y = _Float8Product.apply(x.reshape(-1, x.shape[-1]), weight)
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


def use_float8(module: nn.Module, device: torch.device, recipe: str = "linear") -> list[str]:
    """Make every ColumnLinear and RowLinear inside `module` multiply in float8; return their names.

    recipe: `precision.fp8`; off: none does.

    Raises:
        ConfigError: there is none, this GPU has no float8, or features that do not fit; lists all.
    """
    if recipe == "off":
        return []
    layers = [(name, m) for name, m in module.named_modules() if isinstance(m, Linear)]
    if not layers:
        raise ConfigError(
            "precision.fp8=linear: no ColumnLinear or RowLinear is here (a model of transformers "
            "has them where parallel.tensor is 2 or more); set fp8 to off"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(
            f"precision.fp8=linear: {name} has no float8 matmuls (compute capability "
            f"{torch.cuda.get_device_capability(device)}, needed {CAPABILITY}); set fp8 to off"
        )
    _check_features(layers)
    for _, layer in layers:
        layer.product = float8_linear
    return [name for name, _ in layers]


def _check_features(layers: Iterable[tuple[str, Linear]]) -> None:
    wrong = [
        f"{name} {tuple(layer.weight.shape)}"
        for name, layer in layers
        if any(n % MULTIPLE for n in layer.weight.shape)
    ]
    if wrong:
        raise ConfigError(
            f"precision.fp8=linear: features on a rank must be multiples of {MULTIPLE}, but "
            f"{len(wrong)} weights are not: {', '.join(wrong[:4])}; change the sizes or "
            f"parallel.tensor, or set fp8 to off"
        )
