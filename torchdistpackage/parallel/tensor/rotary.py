"""Rotary positions: each pair of a head's channels is turned by an angle that grows with position.

Su et al., RoFormer, arXiv:2104.09864, section 3.4.2, with the pairs taken half a head apart, as
most published weights have them. Angles are never computed below float32: a half float cannot
tell position 2049 from 2048.
"""

import torch
from torch import Tensor

Tables = tuple[Tensor, Tensor]
"""Cosines and sines, each (S, head_dim / 2)."""


def rotary_tables(
    seq_len: int,
    head_dim: int,
    *,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tables:
    """For positions 0 to seq_len - 1, in float32, or float64 if that is `dtype`."""
    dtype = torch.promote_types(dtype, torch.float32)
    channel = torch.arange(0, head_dim, 2, dtype=dtype, device=device)
    position = torch.arange(seq_len, dtype=dtype, device=device)
    angle = torch.outer(position, base ** (-channel / head_dim))
    return angle.cos(), angle.sin()


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Turn x (..., S, head_dim) by its positions; same dtype as x."""
    cos, sin = tables
    first, second = x.chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)
