"""Attention of one rectangle of scores, with its log-sum-exp, and its backward.

The kernels are torch's own, called below `F.scaled_dot_product_attention`, which does not give the
log-sum-exp away. A backward gets the output and the log-sum-exp of the whole softmax in place of
the rectangle's: p = exp(score - lse) is then the true weight of each score (Liu et al., Ring
Attention, arXiv:2310.01889), and no kernel needs to know that there are other rectangles.

All take queries (B, H, S, D), keys and values (B, h, T, D) with H a multiple of h, and an
additive mask that broadcasts to (B, H, S, T); a log-sum-exp is (B, H, S), of at least float32.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdistpackage.errors import LayoutError

_aten = torch.ops.aten


class Options(NamedTuple):
    """Of one call: the factor of scores, part of the weights dropped, and the triangle alone."""

    scale: float
    dropout: float = 0.0
    is_causal: bool = False


Drawn = Any
"""What a backward needs to drop the same weights again."""
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Kernel:
    """forward(q, k, v, mask, options) -> (out, lse, drawn);
    backward(grad, q, k, v, out, lse, mask, drawn, options) -> gradients of q, k and v.
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor, Drawn]]
    backward: Callable[..., Gradients]


def choose(q: Tensor, v: Tensor, *, masked: bool, dropout: float) -> Kernel:
    """The fastest kernel that can do it.

    Raises:
        LayoutError: no kernel can.
    """
    if not q.is_floating_point():
        raise LayoutError(f"attention of {q.dtype}; use a floating-point dtype")
    same_width, width = q.shape[-1] == v.shape[-1], q.shape[-1]
    if q.device.type == "cpu":
        return FLASH_CPU if same_width and not dropout else BY_HAND
    if q.device.type != "cuda" or q.dtype is torch.float64 or not same_width or width % 8:
        return BY_HAND
    if q.dtype is torch.float32 or masked or width > 256:
        return EFFICIENT
    is_ampere = torch.cuda.get_device_capability(q.device) >= (8, 0)
    return FLASH_CUDA if is_ampere else EFFICIENT


# -- CPU -----------------------------------------------------------------------------------


def _cpu_forward(q, k, v, mask, options):
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, options.is_causal, attn_mask=mask, scale=options.scale
    )
    return out, lse, None


def _cpu_backward(grad, q, k, v, out, lse, mask, drawn, options):
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, options.is_causal, attn_mask=mask, scale=options.scale
    )


FLASH_CPU = Kernel("flash for CPU", _cpu_forward, _cpu_backward)


# -- CUDA ----------------------------------------------------------------------------------


def _flash_forward(q, k, v, mask, options):
    assert mask is None
    k, v = _repeated(q, k), _repeated(q, v)
    out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
        q, k, v, options.dropout, options.is_causal, False, scale=options.scale
    )
    return out, lse, (seed, offset)


def _flash_backward(grad, q, k, v, out, lse, mask, drawn, options):
    whole_k, whole_v = _repeated(q, k), _repeated(q, v)
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
        grad.contiguous(), q, whole_k, whole_v, out, lse.contiguous(), None, None,
        q.shape[2], k.shape[2], options.dropout, options.is_causal, *drawn, scale=options.scale,
    )  # fmt: skip
    return dq, _summed(dk, k), _summed(dv, v)


FLASH_CUDA = Kernel("flash", _flash_forward, _flash_backward)

_LSE_ROWS = 32
"""The memory-efficient kernel reads log-sum-exps in blocks of so many; what is behind is inf."""


def _efficient_forward(q, k, v, mask, options):
    k, v = _repeated(q, k), _repeated(q, v)
    out, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(
        q, k, v, _for_heads(mask, q), True, options.dropout, options.is_causal, scale=options.scale
    )
    return out, lse[..., : q.shape[2]], (seed, offset)


def _efficient_backward(grad, q, k, v, out, lse, mask, drawn, options):
    whole_k, whole_v = _repeated(q, k), _repeated(q, v)
    padding = -q.shape[2] % _LSE_ROWS
    lse = torch.nn.functional.pad(lse, (0, padding), value=math.inf).contiguous()
    bias = _for_heads(mask, q)
    # In half precision the kernel sums grad * out by itself, and reads rows of `out` as its forward
    # lays them out, (B, S, H, D) in memory, whatever the strides say: else dq and dk are wrong.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, whole_k, whole_v, bias, out, lse, *drawn, options.dropout,
        [True, True, True, False], options.is_causal, scale=options.scale,
    )  # fmt: skip
    return dq, _summed(dk, k), _summed(dv, v)


EFFICIENT = Kernel("memory-efficient", _efficient_forward, _efficient_backward)


def _for_heads(mask: Tensor | None, q: Tensor) -> Tensor | None:
    return None if mask is None else mask.expand(q.shape[0], q.shape[1], -1, -1)


# -- by hand: float64 on CUDA, dropout on the CPU, values of another width ------------------


def _hand_scores(q, k, mask, options):
    k = _repeated(q, k)
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * options.scale
    if options.is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores if mask is None else scores + mask


def _hand_forward(q, k, v, mask, options):
    scores = _hand_scores(q, k, mask, options)
    lse = scores.logsumexp(-1)
    weights, drawn = (scores - lse[..., None]).exp(), None
    if options.dropout:
        drawn = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        weights = weights * _kept(weights, drawn, options.dropout)
    return weights.to(v.dtype) @ _repeated(q, v), lse, drawn


def _hand_backward(grad, q, k, v, out, lse, mask, drawn, options):
    weights = (_hand_scores(q, k, mask, options) - lse[..., None]).exp()
    kept = 1.0 if drawn is None else _kept(weights, drawn, options.dropout)
    wide = weights.dtype
    dv = (weights * kept).mT @ grad.to(wide)
    towards = (grad @ _repeated(q, v).mT).to(wide) * kept
    # of a softmax: what its own mean takes back is the same for all rectangles of a row
    mean = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    scores = weights * (towards - mean) * options.scale
    dq, dk = scores @ _repeated(q, k).to(wide), scores.mT @ q.to(wide)
    return dq.to(q.dtype), _summed(dk, k).to(k.dtype), _summed(dv, v).to(v.dtype)


def _kept(weights: Tensor, seed: int, dropout: float) -> Tensor:
    generator = torch.Generator(weights.device).manual_seed(seed)
    drawn = torch.rand(weights.shape, generator=generator, device=weights.device)
    return (drawn >= dropout).to(weights.dtype) / (1 - dropout)


BY_HAND = Kernel("by hand", _hand_forward, _hand_backward)


def _repeated(q: Tensor, x: Tensor) -> Tensor:
    """Keys or values with as many heads as there are queries' heads, each for those next to it."""
    times = q.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """The transpose of `_repeated`."""
    if grad.shape[1] == like.shape[1]:
        return grad
    return grad.unflatten(1, (like.shape[1], -1)).sum(2)
