"""Kernels of one rectangle are torch's attention, forward and backward, and read grouped heads."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.parallel.context import kernels
from torchdistpackage.parallel.context.kernels import Options

HEADS, KV_HEADS, ROWS, WIDTH = 6, 2, 5, 8


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, heads, ROWS, WIDTH, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def expected(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, **options: object) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, enable_gqa=True, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def flash_of_cuda() -> SimpleNamespace:
    """Stand-ins of the CUDA flash operators, which take fewer heads of keys than of queries."""

    def forward(q, k, v, dropout, is_causal, debug, *, scale):
        assert k.shape[1] == v.shape[1] == KV_HEADS
        out, lse, _ = kernels.BY_HAND.forward(q, k, v, None, Options(scale, 0.0, is_causal))
        return out, lse, None, None, None, None, None, None, None

    def backward(grad, q, k, v, out, lse, *rest, scale):
        assert k.shape[1] == v.shape[1] == KV_HEADS
        options = Options(scale, 0.0, rest[5])
        return kernels.BY_HAND.backward(grad, q, k, v, out, lse, None, None, options)

    return SimpleNamespace(
        _scaled_dot_product_flash_attention=forward,
        _scaled_dot_product_flash_attention_backward=backward,
    )


@pytest.mark.parametrize("mask", ["none", "causal", "bias"])
@pytest.mark.parametrize(
    "kernel", [kernels.BY_HAND, kernels.FLASH_CPU, kernels.FLASH_CUDA], ids=lambda x: x.name
)
def test_grouped_heads_are_read_without_copies(monkeypatch, kernel, mask):
    if kernel is kernels.FLASH_CUDA:
        if mask == "bias":
            return
        monkeypatch.setattr(kernels, "_aten", flash_of_cuda())
    monkeypatch.setattr(kernels, "_repeated", None)
    q, k, v, grad = inputs()
    bias = torch.randn(2, 1, ROWS, ROWS, dtype=torch.float64) if mask == "bias" else None
    options = Options(0.3, 0.0, mask == "causal")
    out, lse, drawn = kernel.forward(q, k, v, bias, options)
    found = [out, *kernel.backward(grad, q, k, v, out, lse, bias, drawn, options)]
    true = expected(q, k, v, grad, attn_mask=bias, is_causal=mask == "causal", scale=0.3)
    for x, y in zip(found, true, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
