"""The models of the benchmark as chains of pieces, and where they are cut.

gpt: 6 blocks of width 256, 4096 tokens, not tied, 16 sequences of 128 a step whatever the number of
microbatches; each block is three pieces (attention, and the MLP in two). tiny: eight 8x8 linears, 4
rows a microbatch: what is left is the cost of messages and of the runtime.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIM, HEADS, LAYERS, VOCAB, LENGTH, BATCH = 256, 4, 6, 4096, 128, 16


class Embed(nn.Module):
    """tokens (B, S) -> x (B, S, D)."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]


class Attend(nn.Module):
    """x -> x + attention(norm(x))."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Up(nn.Module):
    """x -> (x, what widens it): half of the MLP, which a cut may divide."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.up(self.norm(x))


class Down(nn.Module):
    """(x, widened) -> x."""

    def __init__(self):
        super().__init__()
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor, widened: Tensor) -> Tensor:
        return x + self.down(F.gelu(widened))


class Head(nn.Module):
    """x -> logits (B, S, VOCAB)."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class Stage(nn.Module):
    """Consecutive pieces under their numbers in the chain."""

    def __init__(self, chain: Sequence[nn.Module], numbers: Sequence[int]):
        super().__init__()
        for i in numbers:
            self.add_module(str(i), chain[i])

    def forward(self, *x):
        for piece in self.children():
            y = piece(*x)
            x = y if isinstance(y, tuple) else (y,)
        return x if len(x) > 1 else x[0]


@dataclass(frozen=True)
class Case:
    """chain: all pieces, alike every time. draw: a batch of m microbatches. loss: the mean of one.

    cuts: by placement the first piece of each stage but the first one.
    """

    chain: Callable[[], list[nn.Module]]
    draw: Callable[[int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    cuts: dict[tuple[int, ...], tuple[int, ...]]

    def stages(self, placement: tuple[int, ...], starts: Sequence[int] = ()) -> list[range]:
        """Pieces of each stage, cut at `starts`, or as the case says."""
        edges = [0, *(starts or self.cuts[placement]), len(self.chain())]
        return [range(a, b) for a, b in pairwise(edges)]


TWO, LOOP, VEE = (0, 1), (0, 1, 0, 1), (0, 1, 1, 0)
"""Placements: for each stage the rank that runs it."""


def _gpt_chain() -> list[nn.Module]:
    torch.manual_seed(0)
    blocks = [piece for _ in range(LAYERS) for piece in (Attend(), Up(), Down())]
    return [Embed(), *blocks, Head()]


def _gpt_batch(m: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _linears() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8) for _ in range(8)]


def _rows(m: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(4 * m, 8, generator=draw), torch.randn(4 * m, 8, generator=draw)


CASES = {
    "gpt": Case(
        _gpt_chain,
        _gpt_batch,
        next_token,
        # 4 blocks, then 2 and the head; in four stages 2, 2, 1, 1 + head and 1, 2, 2, 1 + head
        {TWO: (13,), LOOP: (7, 13, 16), VEE: (4, 10, 16)},
    ),
    "tiny": Case(_linears, _rows, F.mse_loss, {TWO: (4,), LOOP: (2, 4, 6), VEE: (2, 4, 6)}),
}
