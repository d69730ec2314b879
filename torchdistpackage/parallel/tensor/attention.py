"""Self-attention with the heads divided over the tensor group, and rotary positions.

A head is never cut. The q, k, v matmuls are split by columns head by head, each rank attends with
its own heads over the full sequence, and the output matmul sums their results.

Of grouped queries (Ainslie et al., arXiv:2305.13245) each rank gets whole groups, keys and values
included. Where there are more ranks than groups, several share one: each has some of its query
heads and a copy of its key-value head, whose gradient these ranks sum.

With rotary positions each pair of a head's channels is turned by an angle that grows with position:
Su et al., RoFormer, arXiv:2104.09864, section 3.4.2, with the pairs taken half a head apart, as
most published weights have them; the scalings are those of `layout/rope.py`. Angles are never
computed below float32: a half float cannot represent position 2049.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm.operators import is_traced
from torchdistpackage.comm.primitives import Group, Sizes
from torchdistpackage.comm.random import differ, forked_dropout
from torchdistpackage.layout.layout import HeadSplit
from torchdistpackage.layout.partition import attention_problems, refuse
from torchdistpackage.layout.rope import Rope
from torchdistpackage.parallel.tensor.init import NORMAL, Initial
from torchdistpackage.parallel.tensor.linear import ColumnLinear, RowLinear
from torchdistpackage.parallel.tensor.marked import Grouped

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
    """Return the tables for positions 0 to seq_len - 1, in float32, or float64 if that is `dtype`.

    rope: base and scaling; None: `base`, unscaled.
    """
    rope = Rope(theta=base) if rope is None else rope
    # bf16 cannot tell neighbouring positions above 256 apart
    dtype = torch.promote_types(dtype, torch.float32)
    position = torch.arange(seq_len, dtype=dtype, device=device)
    angle = torch.outer(position, rotary_frequencies(rope, head_dim, dtype, device))
    factor = rope.table_factor
    return angle.cos() * factor, angle.sin() * factor


def rotary_frequencies(
    rope: Rope, head_dim: int, dtype: torch.dtype, device: torch.device | str | None = None
) -> Tensor:
    """Return the radians per position of each pair of channels: (head_dim / 2,), fastest first.

    It computes in the order of transformers, so that float32 gives the same bits.
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
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * frequency / rope.factor + blend * frequency
    first, last = rope.yarn_ramp(head_dim)
    pair = torch.arange(head_dim // 2, dtype=dtype, device=device)
    # a ramp of no length is a step
    blend = 1 - ((pair - first) / (last - first or 1e-3)).clamp(0, 1)
    return 1.0 / (rope.factor * period) * (1 - blend) + frequency * blend


def rotate(x: Tensor, tables: Tables) -> Tensor:
    """Rotate x (..., S, head_dim) by its positions; the result has the dtype of x.

    tables: for all samples alike, or (B, 1, S, head_dim / 2) for each, with x (B, heads, S,
    head_dim).
    """
    cos, sin = tables
    first, second = x.chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    # the tables are float32, since angles of late positions need more digits than bf16 has
    return turned.to(x.dtype)


TORCH_NAMES = {
    "in_proj_weight": "qkv.weight",
    "in_proj_bias": "qkv.bias",
    "out_proj.weight": "out.weight",
    "out_proj.bias": "out.bias",
}
"""Parameters of `torch.nn.MultiheadAttention` as `ParallelAttention` calls them."""


class ParallelAttention(Grouped):
    """Multi-head self-attention: x (S, B, D) to (S, B, D); both S/n when sequence-parallel.

    heads: of queries; the group need not divide them.
    kv_heads: of keys and values, where they are fewer; default as many as `heads`.
    head_dim: channels of a head; default dim / heads.
    causal: a position sees itself and those before it.
    bias: of the products; out_bias: of the output product, default the same.
    dropout: part of the attention weights dropped, with masks of each rank's own.
    out_initial: initial weights of the output product, where they differ from `initial`.
    sequence: attends over the sequence; default: all of it is on this rank.

    `num_heads` and `num_kv_heads` are those of this rank. `from_full` also takes a
    `torch.nn.MultiheadAttention` or its tensors.

    Raises:
        LayoutError: dim is not a multiple of the heads, the heads not of `kv_heads`, or a rank
            would have no head; lists all.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        bias: bool = True,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        sequence_parallel: bool = False,
        tp_comm_overlap: bool = False,
        initial: Initial = NORMAL,
        out_initial: Initial | None = None,
        sequence: "SequenceAttention | None" = None,
        group: Group | None = None,
        axis: str = "tensor",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group, axis)
        size, index = self.group.size(), self.group.rank()
        refuse("ParallelAttention", attention_problems(dim, heads, size, kv_heads, head_dim))
        kv_heads = heads if kv_heads is None else kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        query, shared = HeadSplit(kv_heads, heads // kv_heads), HeadSplit(kv_heads, shared=True)
        self.fused = kv_heads == heads
        _, self.num_heads = query.head_range(size, index)
        _, self.num_kv_heads = (query if self.fused else shared).head_range(size, index)
        self.causal, self.dropout = causal, dropout
        self.sequence = sequence or WholeSequence()
        common = {
            "sequence_parallel": sequence_parallel,
            "tp_comm_overlap": tp_comm_overlap,
            "group": self.group,
            "axis": axis,
            "dtype": dtype,
            "device": device,
        }
        q, kv = heads * self.head_dim, kv_heads * self.head_dim
        columns = {"bias": bias, "initial": initial, **common}
        if self.fused:
            self.qkv = ColumnLinear(dim, 3 * q, parts=(q, q, q), heads=query, **columns)
        else:
            self.q = ColumnLinear(dim, q, heads=query, **columns)
            self.kv = ColumnLinear(dim, 2 * kv, parts=(kv, kv), heads=shared, **columns)
        common["bias"] = bias if out_bias is None else out_bias
        self.out = RowLinear(q, dim, heads=query, initial=out_initial or initial, **common)

    def full_names(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors under this layer's names."""
        return {TORCH_NAMES.get(name, name): x for name, x in tensors.items()}

    def forward(
        self,
        x: Tensor,
        rotary: Tables | None = None,
        sizes: Sizes | None = None,
        mask: Any = None,
    ) -> Tensor:
        """Attend over the sequence of x."""
        q, k, v = self._heads_of(x, sizes)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        dropout = self.dropout if self.training else 0.0
        mixed = self.sequence(q, k, v, self.causal, dropout, self.group, mask)
        return self.out(mixed.permute(2, 0, 1, 3).flatten(2), sizes)

    def _heads_of(self, x: Tensor, sizes: Sizes | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of this rank's heads, (B, h, S, d) each."""
        width = self.head_dim
        if self.fused:
            # (S, B, 3 h d) -> three of (B, h, S, d)
            qkv = self.qkv(x, sizes).unflatten(-1, (3, self.num_heads, width))
            q, k, v = qkv.permute(2, 1, 3, 0, 4)
            return q, k, v
        q, kv = ColumnLinear.side_by_side(x, (self.q, self.kv), sizes)
        q = q.unflatten(-1, (self.num_heads, width)).permute(1, 2, 0, 3)
        k, v = kv.unflatten(-1, (2, self.num_kv_heads, width)).permute(2, 1, 3, 0, 4)
        return q, k, v


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that a forward receives, from a sequence of `seq_len`.

    positions: (B, S) or (S,), the places of the tokens here; None: 0 to S - 1. mask: what attention
    needs to keep documents apart; None: a sample is one document. last_only: of all tokens here
    only the last needs logits.
    """

    seq_len: int
    positions: Tensor | None = None
    mask: Any = None
    last_only: bool = False


class SequenceAttention(Protocol):
    """A rule for attention over a sequence of which this rank has all tokens or a slice."""

    def tokens(self, num: int, position_ids: Tensor | None, device: torch.device) -> Tokens:
        """Return the tokens of a forward with `num` tokens per sample on this rank.

        position_ids: (B, S) of the whole sequence, from 0 in each document; None: a sample is one
            document.
        """
        ...

    def ranges(self, seq_len: int) -> Sequence[range]:
        """Return the positions that this rank holds, in local order."""
        ...

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's slice of the full sequences `x` (B, S, ...)."""
        ...

    def place(self, position: int, seq_len: int) -> tuple[int, int]:
        """Return (index along context of the rank that holds a position, its index there)."""
        ...

    @property
    def multiple(self) -> int:
        """Number that must divide the length of a sequence."""
        ...

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        dropout: float,
        group: Group | None,
        mask: Any,
    ) -> Tensor:
        """Return the attention of this rank's queries, as `attend` does; mask: that of `tokens`."""
        ...


class WholeSequence:
    """Attention over a sequence that this rank holds in full."""

    def tokens(self, num: int, position_ids: Tensor | None, device: torch.device) -> Tokens:
        if position_ids is None:
            return Tokens(num)
        return Tokens(num, position_ids, document_mask(position_ids))

    def ranges(self, seq_len: int) -> Sequence[range]:
        return (range(seq_len),)

    def part(self, x: Tensor) -> Tensor:
        return x

    def place(self, position: int, seq_len: int) -> tuple[int, int]:
        return 0, position

    multiple = 1

    def __call__(self, q, k, v, causal, dropout, group, mask) -> Tensor:
        return attend(q, k, v, causal, dropout, group, mask)


def document_mask(position_ids: Tensor) -> Tensor:
    """Return which positions a position sees: those of its own document up to itself.

    position_ids (B, S): begin with 0 in each document. Returns (B, 1, S, S), of True and False.
    """
    document = (position_ids == 0).cumsum(1)
    return (document[:, None, :, None] == document[:, None, None, :]).tril()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    dropout: float,
    group: Group | None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v for this rank's heads, (B, h, S, d) each.

    Keys and values may have fewer heads, each for equally many consecutive query heads. group:
    ranks that share the heads, each with its own dropout masks; None: all heads are here. mask:
    replaces `causal`.
    """
    options = {"attn_mask": mask, "is_causal": causal and mask is None, "dropout_p": dropout}
    options["enable_gqa"] = q.shape[1] != k.shape[1]
    if not dropout or group is None:
        return F.scaled_dot_product_attention(q, k, v, **options)
    if is_traced():
        return _attend_by_hand(q, k, v, causal and mask is None, dropout, group.rank(), mask)
    with differ(group.rank(), q.device):
        return F.scaled_dot_product_attention(q, k, v, **options)


def _attend_by_hand(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, dropout: float, index: int, mask: Tensor | None
) -> Tensor:
    """Compute attention with dropped weights as torch does without a kernel, in the same order.

    In a graph, masks of a forked random state must be tensors.
    """
    times = q.shape[1] // k.shape[1]
    if times > 1:
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    root = q.shape[-1] ** -0.25
    scores = (q * root) @ (k * root).transpose(-2, -1)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1)
    return (weights * forked_dropout(weights.shape, weights, dropout, index)) @ v
