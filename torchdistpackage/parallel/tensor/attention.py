"""Self-attention with the heads cut over the tensor group.

One rule: a head is never cut. The fused product for q, k, v is split by columns head by head, each
rank attends with its own heads over the whole sequence, and the output product sums them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.random import differ
from torchdistpackage.parallel.tensor.grouped import Grouped
from torchdistpackage.parallel.tensor.init import NORMAL, Initial
from torchdistpackage.parallel.tensor.layouts import heads_per_rank
from torchdistpackage.parallel.tensor.linear import ColumnLinear, RowLinear
from torchdistpackage.parallel.tensor.rotary import Tables, rotate


class ParallelAttention(Grouped):
    """Multi-head self-attention: x (S, B, D) to (S, B, D); both S/n when sequence-parallel.

    causal: a position sees itself and those before it.
    dropout: part of the attention weights dropped, with masks of each rank's own.
    out_initial: initial weights of the output product, where they differ from `initial`.

    Raises:
        LayoutError: dim is not a multiple of the heads, or the heads of the group's size.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = False,
        bias: bool = True,
        dropout: float = 0.0,
        sequence_parallel: bool = False,
        initial: Initial = NORMAL,
        out_initial: Initial | None = None,
        group: Group | None = None,
        axis: str = "tensor",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group, axis)
        self.num_heads = heads_per_rank(dim, heads, self.group.size())
        self.head_dim = dim // heads
        self.causal, self.dropout = causal, dropout
        common = {
            "bias": bias,
            "sequence_parallel": sequence_parallel,
            "group": self.group,
            "axis": axis,
            "dtype": dtype,
            "device": device,
        }
        self.qkv = ColumnLinear(dim, 3 * dim, parts=(dim, dim, dim), initial=initial, **common)
        self.out = RowLinear(dim, dim, initial=out_initial or initial, **common)

    def forward(self, x: Tensor, rotary: Tables | None = None) -> Tensor:
        """rotary: tables for the whole sequence, to turn queries and keys by."""
        qkv = self.qkv(x)
        seq_len, batch = qkv.shape[:2]
        # (S, B, 3 h d) -> three of (B, h, S, d)
        q, k, v = qkv.view(seq_len, batch, 3, self.num_heads, self.head_dim).permute(2, 1, 3, 0, 4)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        mixed = attend(q, k, v, self.causal, self.dropout if self.training else 0.0, self.group)
        return self.out(mixed.permute(2, 0, 1, 3).flatten(2))


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float, group: Group | None
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v for this rank's heads, (B, h, S, d) each.

    group: whose ranks share the heads, each with dropout masks of its own; None: all are here.
    """
    if not dropout or group is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout)
    with differ(group.rank(), q.device):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout)
