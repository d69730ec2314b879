"""A decoder-only transformer whose every stage is the same class.

A GPT holds any run of consecutive pieces (embed, halves of blocks, head), under names that do not
depend on the run. Its input and output follow from the run: token ids enter the embedding,
activations pass between blocks, and logits leave the head. Activations are (S, B, D), and (S/n, B,
D) under sequence parallelism.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import DataError, LayoutError
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.models import gpt_layout
from torchdistpackage.models.gpt_cache import GPTCache
from torchdistpackage.models.gpt_layout import ATTENTION, EMBED, HEAD, MLP, TIED, GPTShape
from torchdistpackage.parallel.expert.layer import MoELayer
from torchdistpackage.parallel.tensor.attention import (
    ParallelAttention,
    SequenceAttention,
    Tables,
    Tokens,
    WholeSequence,
    rotary_tables,
)
from torchdistpackage.parallel.tensor.cross_entropy import vocab_parallel_cross_entropy
from torchdistpackage.parallel.tensor.dropout import Dropout
from torchdistpackage.parallel.tensor.embedding import VocabParallelEmbedding
from torchdistpackage.parallel.tensor.init import NORMAL, Initial, make_parameters
from torchdistpackage.parallel.tensor.layouts import Layouts
from torchdistpackage.parallel.tensor.linear import ParallelMlp, column_linear
from torchdistpackage.parallel.tensor.marked import Grouped
from torchdistpackage.parallel.tensor.norm import LayerNorm, RMSNorm

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "swiglu": F.silu,
}
"""Activation function by the kind of MLP; swiglu has a gate too."""


Noise = Callable[..., Tensor]
"""Function called as noise(vectors), or as noise(vectors, index, number) with a slice of them."""


class GPT(Grouped):
    """A run of pieces of a GPT.

    pieces: indices into `gpt_layout.pieces(shape)`; None is all of them, an empty range none.
    stage_of: for each piece of the whole model the pipe index that holds it; None: no pipeline.
    dropout: after the embedding, on attention weights, and on each branch of a block.
    tp_comm_overlap: gather and scatter a split sequence in chunks, under the products.
    sequence: attends over the sequence, of which this rank may hold a part; default: it has all.
    device: parameters may be made on "meta" and filled later.

    A tied head shares the embedding's Parameter where this run holds both; apart from it, it
    holds a copy of its own, which `layouts()` gives the same global name.

    Raises:
        LayoutError: the group cannot share the model (lists all sizes that do not fit), or
            `pieces` is not a run of the model's.
    """

    rows_dim = 1
    """The dim of logits (S, B, V/n) along which samples lie."""

    def __init__(
        self,
        shape: GPTShape,
        *,
        pieces: range | None = None,
        stage_of: Sequence[int] | None = None,
        group: Group | None = None,
        axis: str = "tensor",
        dropout: float = 0.0,
        tp_comm_overlap: bool = False,
        sequence: SequenceAttention | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(group, axis)
        self.sequence = sequence or WholeSequence()
        gpt_layout.check_split(shape, self.group.size())
        names = gpt_layout.pieces(shape)
        pieces = range(len(names)) if pieces is None else pieces
        if pieces and (pieces.step != 1 or pieces.start < 0 or pieces.stop > len(names)):
            raise LayoutError(
                f"gpt: {pieces} is not a range within the {len(names)} pieces of {shape.layers} "
                f"layers; use one with step 1 between 0 and {len(names)}"
            )
        held_names = [names[index] for index in pieces]
        self.shape, self.stage_of = shape, stage_of
        common = {"group": self.group, "axis": axis, "dtype": dtype, "device": device}
        self.embed = Embed(shape, dropout, **common) if EMBED in held_names else None
        halves: dict[str, list[str]] = {}
        for name in held_names:
            if name not in (EMBED, HEAD):
                _, index, half = name.split(".")
                halves.setdefault(index, []).append(half)
        self.blocks = nn.ModuleDict(
            {
                index: GPTBlock(
                    shape,
                    int(index),
                    dropout,
                    held_names,
                    tp_comm_overlap,
                    sequence=self.sequence,
                    **common,
                )
                for index, held_names in halves.items()
            }
        )
        self.head = Head(shape, **common) if HEAD in held_names else None
        if shape.tied and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight
        self.mark()

    def layouts(self) -> Layouts:
        """Return the layout of each parameter by its local name. A tied head's own copy,
        `head.weight`, has the global name `embed.weight`.
        """
        by_name = gpt_layout.layouts(self.shape, self.stage_of, self.axis)
        return {
            name: by_name[TIED if self.shape.tied and name == "head.weight" else name]
            for name, _ in self.named_parameters()
        }

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Run the pieces that are here on x: ids (B, S) int64 if the embedding is here, else
        activations. Return logits (S, B, V/n) if the head is here, else activations. S counts the
        tokens of this rank.

        position_ids (B, S) int64 of the whole sequence, on every stage and rank: of several
        documents in a sample, from 0 in each; no token sees another document. None: one document.

        Raises:
            DataError: S is longer than the table of learned positions.
            LayoutError: under sequence parallelism, S is not a multiple of the group's size.
        """
        cuts = self.group.size() if self.shape.sequence_parallel else 1
        num = x.shape[1] if self.embed is not None else x.shape[0] * cuts
        tokens = self.sequence.tokens(num, position_ids, x.device)
        if self.embed is not None:
            x = self.embed(x, tokens)
        if self.blocks:
            tables = self._rotary(x, tokens)
            for block in self.blocks.values():
                x = block(x, tables, tokens.mask)
        if self.head is None:
            return x
        return self.head(x[-1:] if tokens.last_only else x)

    def add_embedding_noise(self, noise: Noise) -> None:
        """Make `noise` change the token vectors in training, before positions and dropout.

        It is called with the vectors of all tokens, or with those of slice `index` of `number`
        along dim 0, and returns as many.
        """
        assert self.embed is not None, "another stage embeds"
        self.embed.noise = noise

    def make_cache(self) -> GPTCache | None:
        """Return a cache of keys and values for one batch, or None if tokens cannot be computed one
        at a time (sequence parallelism, experts with a capacity).
        """
        moe = self.shape.moe
        is_alone = self.shape.sequence_parallel or (moe is not None and moe.capacity_factor)
        return None if is_alone else GPTCache(self)

    def loss(
        self,
        logits: Tensor,
        targets: Tensor,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return (sum of the tokens' losses, number of tokens counted): two scalars, equal over the
        group.

        logits (S, B, V/n) as `forward` gives them; targets (B, S) int64.
        """
        losses = vocab_parallel_cross_entropy(
            logits,
            targets.t(),
            self.group,
            vocab=self.shape.vocab,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )
        return losses.sum(), (targets != ignore_index).sum()

    @property
    def vocab_group(self) -> Group:
        """Return the ranks that each have logits for their own columns of the vocabulary."""
        return self.group

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Return the logits (B, S, V) of all tokens, in the order of the targets, equal over the
        group.

        logits (S, B, V/n) as `forward` gives them.
        """
        return self._joined(logits).transpose(0, 1)

    def logits_at(self, logits: Tensor, position: int) -> Tensor:
        """Return the logits (V,) at one position of the first sample, equal over the group.

        logits (S, B, V/n) as `forward` gives them.
        """
        return self._joined(logits[position, 0])

    def _joined(self, logits: Tensor) -> Tensor:
        sizes = even_sizes(self.shape.vocab, self.group.size())
        return collectives.gather(logits, -1, self.group, sizes)

    def _rotary(self, x: Tensor, tokens: Tokens) -> Tables | None:
        if self.shape.position != "rotary":
            return None
        cos, sin = rotary_tables(
            tokens.seq_len,
            self.shape.head_dim,
            rope=self.shape.rope,
            dtype=x.dtype,
            device=x.device,
        )
        if (positions := tokens.positions) is None:
            return cos, sin
        cos, sin = cos[positions], sin[positions]
        # of each sample: the same for all heads
        return (cos, sin) if positions.dim() == 1 else (cos.unsqueeze(1), sin.unsqueeze(1))


class Embed(VocabParallelEmbedding):
    """Embeds ids (B, S) as token vectors, and adds learned positions if the model has them."""

    def __init__(self, shape: GPTShape, dropout: float, **common):
        self.shape = shape  # first, since the parameters are made from layouts()
        super().__init__(
            shape.vocab, shape.dim, sequence_parallel=shape.sequence_parallel, **common
        )
        self.noise: Noise | None = None
        split = shape.sequence_parallel
        self.drop = Dropout(dropout, split=split, group=self.group, axis=self.axis)

    def layouts(self) -> Layouts:
        return gpt_layout.piece_layouts(self.shape, EMBED, self.axis)

    def initials(self) -> dict[str, Initial]:
        return {"weight": NORMAL, "position": NORMAL}

    def forward(self, ids: Tensor, tokens: Tokens | None = None) -> Tensor:
        x = super().forward(ids.t())
        if self.noise is not None and self.training:
            is_shared = self.shape.sequence_parallel
            x = self.noise(x, self.group.rank(), self.group.size()) if is_shared else self.noise(x)
        if self.position is not None:
            x = x + self._positions(ids.shape[1], tokens or Tokens(ids.shape[1]))
        return self.drop(x)

    def _positions(self, rows: int, tokens: Tokens) -> Tensor:
        """Return the position vectors of the tokens here (under sequence parallelism, of this
        rank's slice of them): (S/n, B, D) if each sample has its own positions, (S/n, 1, D) if all
        share them.
        """
        if tokens.seq_len > self.shape.num_positions:
            raise DataError(
                f"gpt: a sequence of {tokens.seq_len} tokens, but positions are learned for "
                f"{self.shape.num_positions}; shorten it, or use rotary positions"
            )
        table, first = self.position, 0
        if self.shape.sequence_parallel:
            rows = rows // self.group.size()
            table, first = self.summed(table), self.group.rank() * rows
        if (positions := tokens.positions) is None:
            return table.narrow(0, first, rows).unsqueeze(1)
        positions = positions[:, None] if positions.dim() == 1 else positions.t()
        return F.embedding(positions.narrow(0, first, rows), table)


class GPTBlock(nn.Module):
    """Pre-norm block: x + attention(norm1(x)), then x + mlp(norm2(x)); `halves` of it are here."""

    def __init__(
        self,
        shape: GPTShape,
        index: int,
        dropout: float,
        halves: Sequence[str],
        tp_comm_overlap: bool = False,
        sequence: SequenceAttention | None = None,
        **common,
    ):
        super().__init__()
        dim, sequence_parallel = shape.dim, shape.sequence_parallel
        # each of 2L branches adds to the residual stream, whose variance should not grow with L
        branch = Initial("normal", NORMAL.std / (2 * shape.layers) ** 0.5)
        self.attention = self.mlp = None
        if ATTENTION in halves:
            self.norm1 = _norm(shape, **common)
            self.attention = ParallelAttention(
                dim,
                shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_width,
                causal=True,
                bias=shape.attention_bias,
                dropout=dropout,
                sequence_parallel=sequence_parallel,
                tp_comm_overlap=tp_comm_overlap,
                out_initial=branch,
                sequence=sequence,
                **common,
            )
        if MLP in halves:
            self.norm2 = _norm(shape, **common)
            common_mlp = {
                "activation": ACTIVATIONS[shape.mlp],
                "sequence_parallel": sequence_parallel,
                "down_initial": branch,
            }
            moe = shape.moe_of(index)
            if moe is None:
                self.mlp = ParallelMlp(
                    dim,
                    shape.hidden,
                    gated=shape.mlp == "swiglu",
                    bias=shape.mlp_bias,
                    tp_comm_overlap=tp_comm_overlap,
                    **common_mlp,
                    **common,
                )
            else:
                # a loss of sums over tokens, on every stage; microbatches know no global batch, and
                # what is not finite the trainer finds and names
                self.mlp = MoELayer.of_shape(
                    dim,
                    moe,
                    attach_loss=True,
                    step_counts=True,
                    check_nan=False,
                    name=f"blocks.{index}.mlp",
                    **common_mlp,
                    **{"tensor_group" if k == "group" else k: x for k, x in common.items()},
                )
        group, axis = common["group"], common["axis"]
        self.drop = Dropout(dropout, split=sequence_parallel, group=group, axis=axis)

    def forward(self, x: Tensor, rotary: Tables | None = None, mask: Any = None) -> Tensor:
        if self.attention is not None:
            x = x + self.drop(self.attention(self.norm1(x), rotary, mask=mask))
        return x if self.mlp is None else x + self.drop(self.mlp(self.norm2(x)))


def _norm(shape: GPTShape, **common) -> LayerNorm | RMSNorm:
    make = RMSNorm if shape.norm == "rms" else LayerNorm
    sequence_parallel = shape.sequence_parallel
    return make(shape.dim, eps=shape.norm_eps, sequence_parallel=sequence_parallel, **common)


class Head(Grouped):
    """Turns activations into logits (S, B, this rank's columns of the vocabulary)."""

    def __init__(self, shape: GPTShape, *, group: Group, axis: str, dtype=None, device=None):
        super().__init__(group, axis)
        self.shape = shape
        common = {"group": self.group, "axis": axis, "dtype": dtype, "device": device}
        self.norm = _norm(shape, **common)
        make_parameters(self, dtype, device)

    def layouts(self) -> Layouts:
        return gpt_layout.embed(self.shape, self.axis)

    def initials(self) -> dict[str, Initial]:
        return {"weight": NORMAL}

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(
            self.norm(x), self.weight, None, self.group, self.shape.sequence_parallel
        )
