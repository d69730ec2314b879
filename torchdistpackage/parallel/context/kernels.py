"""Kernels for one rectangle of scores: its attention, its log-sum-exp and its backward.

These are torch's own kernels, called directly because `F.scaled_dot_product_attention` does not
return the log-sum-exp. A backward gets the output and log-sum-exp of the complete softmax instead
of the rectangle's. Then p = exp(score - lse) is the true weight of each score (Liu et al., Ring
Attention, arXiv:2310.01889), and a kernel need not know that other rectangles exist.

Every kernel takes queries (B, H, S, D), keys and values (B, h, T, D) with H a multiple of h, and
an additive mask that broadcasts to (B, H, S, T). A log-sum-exp is (B, H, S), in at least float32.
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
    """Options of one kernel call: factor of the scores, fraction of weights dropped, causal
    mask.
    """

    scale: float
    dropout: float = 0.0
    is_causal: bool = False


Drawn = Any
"""Random state with which a backward drops the same weights again."""
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Kernel:
    """A named pair of functions that compute attention forward and backward.

    forward(q, k, v, mask, options) -> (out, lse, drawn)
    backward(grad, q, k, v, out, lse, mask, drawn, options) -> gradients of q, k and v
    """

    name: str
    forward: Callable[..., tuple[Tensor, Tensor, Drawn]]
    backward: Callable[..., Gradients]


def choose(q: Tensor, v: Tensor, *, masked: bool, dropout: float) -> Kernel:
    """Return the fastest kernel that supports these inputs.

    Raises:
        LayoutError: the dtype is not a floating-point one.
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
    out, lse, _, _, _, _, seed, offset, _ = _aten._scaled_dot_product_flash_attention(
        q, k, v, options.dropout, options.is_causal, False, scale=options.scale
    )
    return out, lse, (seed, offset)


def _flash_backward(grad, q, k, v, out, lse, mask, drawn, options):
    return _aten._scaled_dot_product_flash_attention_backward(
        grad.contiguous(), q, k, v, out, lse.contiguous(), None, None,
        q.shape[2], k.shape[2], options.dropout, options.is_causal, *drawn, scale=options.scale,
    )  # fmt: skip


FLASH_CUDA = Kernel("flash", _flash_forward, _flash_backward)

_LSE_ROWS = 32
"""Rows of a block in which the memory-efficient kernel reads log-sum-exps; blocks are padded with
inf.
"""


def _efficient_forward(q, k, v, mask, options):
    k, v = _repeated(q, k), _repeated(q, v)
    out, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(
        q, k, v, _for_heads(mask, q), True, options.dropout, options.is_causal, scale=options.scale
    )
    return out, lse[..., : q.shape[2]], (seed, offset)


def _efficient_backward(grad, q, k, v, out, lse, mask, drawn, options):
    all_k, all_v = _repeated(q, k), _repeated(q, v)
    padding = -q.shape[2] % _LSE_ROWS
    lse = torch.nn.functional.pad(lse, (0, padding), value=math.inf).contiguous()
    bias = _for_heads(mask, q)
    # In half precision the kernel sums grad * out itself and ignores the strides of `out`: it
    # assumes its forward's memory order (B, S, H, D). Any other order gives wrong dq and dk.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, all_k, all_v, bias, out, lse, *drawn, options.dropout,
        [True, True, True, False], options.is_causal, scale=options.scale,
    )  # fmt: skip
    return dq, _summed(dk, k), _summed(dv, v)


EFFICIENT = Kernel("memory-efficient", _efficient_forward, _efficient_backward)


def _for_heads(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Expand a mask to all samples and heads, as the memory-efficient kernel requires."""
    return None if mask is None else mask.expand(q.shape[0], q.shape[1], -1, -1)


# -- by hand: float64 on CUDA, dropout on the CPU, values of another width ------------------


def _hand_scores(q, k, mask, options):
    # in float32, as the kernels of torch keep the scores before the softmax
    scores = (
        _by_query(q, _by_key(q, k) @ k.mT).to(torch.promote_types(q.dtype, torch.float32))
        * options.scale
    )
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
    # as flash attention: weights are computed in float32, and multiplied in the dtype of values
    return _by_query(q, _by_key(weights.to(v.dtype), v) @ v), lse, drawn


def _hand_backward(grad, q, k, v, out, lse, mask, drawn, options):
    weights = (_hand_scores(q, k, mask, options) - lse[..., None]).exp()
    kept_factor = 1.0 if drawn is None else _kept(weights, drawn, options.dropout)
    # sums are in the dtype of the weights, float32 for half precision, as in flash attention
    sum_dtype = weights.dtype
    dv = _by_key(weights * kept_factor, v).mT @ _by_key(grad.to(sum_dtype), v)
    grad_weights = _by_query(q, _by_key(grad, v) @ v.mT).to(sum_dtype) * kept_factor
    # The softmax subtracts a row's mean gradient. It comes from the complete output, so it is the
    # same for all rectangles of a row.
    row_mean = (grad.to(sum_dtype) * out.to(sum_dtype)).sum(-1, keepdim=True)
    grad_scores = weights * (grad_weights - row_mean) * options.scale
    grad_scores = _by_key(grad_scores, k)
    dq, dk = grad_scores @ k.to(sum_dtype), grad_scores.mT @ _by_key(q, k).to(sum_dtype)
    return _by_query(q, dq).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _by_key(x: Tensor, k: Tensor) -> Tensor:
    """Group rows of queries (B, H, S, ...) by their key heads, (B, h, H / h S, ...), so that a
    matmul reads each key once.
    """
    return x.reshape(x.shape[0], k.shape[1], -1, x.shape[-1])


def _by_query(q: Tensor, x: Tensor) -> Tensor:
    """Return rows by the heads of queries again, the inverse of `_by_key`."""
    return x.reshape(*q.shape[:3], x.shape[-1])


def _kept(weights: Tensor, seed: int, dropout: float) -> Tensor:
    """Return the dropout factor of each weight: 0, or 1 / (1 - dropout) if the weight is kept."""
    generator = torch.Generator(weights.device).manual_seed(seed)
    uniform = torch.rand(weights.shape, generator=generator, device=weights.device)
    return (uniform >= dropout).to(weights.dtype) / (1 - dropout)


BY_HAND = Kernel("by hand", _hand_forward, _hand_backward)


def _repeated(q: Tensor, x: Tensor) -> Tensor:
    """Repeat the heads of keys or values to the number of query heads, copies side by side.

    Only the memory-efficient kernel needs it: all others take grouped heads.
    """
    times = q.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _summed(grad: Tensor, like: Tensor) -> Tensor:
    """Sum the gradients of repeated heads, the transpose of `_repeated`."""
    if grad.shape[1] == like.shape[1]:
        return grad
    return grad.unflatten(1, (like.shape[1], -1)).sum(2)
