"""The answer of one process, which every layout is compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.parallel import context_attention, gather_sequence, shard_sequence


def seen(seq_len: int, causal: bool, window: int | None, ids: Tensor | None) -> Tensor:
    """(1 or B, 1, S, S), by the definition."""
    place = torch.arange(seq_len)
    distance = place[:, None] - place
    mask = torch.ones(seq_len, seq_len, dtype=torch.bool)
    if causal:
        mask &= distance >= 0
    if window is not None:
        mask &= distance.abs() < window
    mask = mask[None, None]
    return mask if ids is None else mask & (ids[:, None, :, None] == ids[:, None, None, :])


def documents(batch: int, seq_len: int) -> Tensor:
    """Ids (B, S): a document of one token, long ones, and in sample 1 one in two pieces."""
    place = torch.arange(seq_len)
    ids = torch.stack(
        [(place > seq_len // 3).long() + (place > seq_len // 2 + b) for b in range(batch)]
    )
    ids[1, 0], ids[1, -1] = 7, 0
    return ids


def random_qkv(heads: int, kv_heads: int, seq_len: int, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seq_len)
    return [
        torch.randn(2, h, seq_len, width, generator=generator, dtype=torch.float64)
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def one_process(qkv: list[Tensor], mask: Tensor) -> list[Tensor]:
    """Output, and gradients of q, k and v, of `F.scaled_dot_product_attention`."""
    *inputs, grad = qkv
    inputs = [x.requires_grad_() for x in inputs]
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def difference(
    comm_type: str,
    order: str,
    heads: tuple[int, int],
    seq_len: int,
    causal: bool,
    window: int | None,
    docs: bool,
) -> float:
    """The largest, over the output and all gradients, from the answer of one process."""
    qkv = random_qkv(*heads, seq_len)
    ids = documents(2, seq_len) if docs else None
    truth = one_process([x.clone() for x in qkv], seen(seq_len, causal, window, ids))
    *parts, grad = (shard_sequence(x, 2, order=order) for x in qkv)
    parts = [x.requires_grad_() for x in parts]
    out = context_attention(
        *parts,
        is_causal=causal,
        enable_gqa=True,
        window=window,
        document_ids=None if ids is None else shard_sequence(ids, 1, order=order),
        comm_type=comm_type,
        order=order,
    )
    found = [out.detach(), *torch.autograd.grad(out, parts, grad)]
    wholes = [gather_sequence(x, 2, order=order) for x in found]
    return max(float((a - b).abs().max()) for a, b in zip(wholes, truth, strict=True))
