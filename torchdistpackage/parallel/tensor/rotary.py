"""Rotary positions: each pair of a head's channels is turned by an angle that grows with position.

Su et al., RoFormer, arXiv:2104.09864, section 3.4.2, with the pairs taken half a head apart, as
most published weights have them; the scalings are those of `layout/rope.py`. Angles are never
computed below float32: a half float cannot tell position 2049 from 2048.
"""

import math

import torch
from torch import Tensor

from torchdistpackage.layout.rope import Rope

Tables = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, each (S, head_dim / 2)."""


def rotary_tables(
    seq_len: int,
    head_dim: int,
    *,
    base: float = 10000.0,
    rope: Rope | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tables:
    """For positions 0 to seq_len - 1, in float32, or float64 if that is `dtype`.

    rope: base and scaling; None: `base`, unscaled.
    """
    rope = Rope(theta=base) if rope is None else rope
    dtype = torch.promote_types(dtype, torch.float32)
    position = torch.arange(seq_len, dtype=dtype, device=device)
    angle = torch.outer(position, rotary_frequencies(rope, head_dim, dtype, device))
    factor = rope.table_factor
    return angle.cos() * factor, angle.sin() * factor


def rotary_frequencies(
    rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device | str | None = None
) -> Tensor:
    """Radians per position of each pair of channels: (head_dim / 2,), fastest first.

    In the order of operations of transformers, so that float32 gives the same bits.
    """
    channel = torch.arange(0, head_dim, 2, dtype=dtype, device=device)
    period = rope.theta ** (channel / head_dim)
    frequency = 1.0 / period
    if rope.type == "default":
        return frequency
    assert rope.factor is not None
    if rope.type == "linear":
        return frequency / rope.factor
    if rope.type == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        original = rope.original_max_position_embeddings
        assert low is not None and high is not None and original is not None
        turns = original / (2 * math.pi / frequency)
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequency / rope.factor + kept * frequency
    first, last = rope.yarn_ramp(head_dim)
    pair = torch.arange(head_dim // 2, dtype=dtype, device=device)
    # a ramp of no length is a step
    kept = 1 - ((pair - first) / (last - first or 1e-3)).clamp(0, 1)
    return 1.0 / (rope.factor * period) * (1 - kept) + frequency * kept


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Turn x (..., S, head_dim) by its positions; same dtype as x.

    tables: for all samples alike, or (B, 1, S, head_dim / 2) each, for x (B, heads, S, head_dim).
    """
    cos, sin = tables
    first, second = x.chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)
