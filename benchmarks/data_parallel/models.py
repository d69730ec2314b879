"""The models of the benchmark, their losses and their data.

mlp: 8 x Linear(1024), batch 256: 33.6 MB of gradients. gpts: a GPT of 6 layers, width 384, 8192
tokens, tied, 4 sequences of 64: 55.3 MB, bound by communication. gpt: the same on sequences of
256, bound by computation. tiny: 2,000 parameters of 16 or 256 elements.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIM, HEADS, LAYERS, VOCAB, BATCH = 384, 6, 6, 8192, 4


@dataclass(frozen=True)
class Case:
    """make: a model on the CPU. draw: one batch. loss: of a model on that batch. blocks: of the
    model, what FSDP wraps one by one."""

    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    blocks: Callable[[nn.Module], list[nn.Module]]


class Block(nn.Module):
    """x (B, S, D) -> (B, S, D): causal attention and a feed-forward of 4 D, norms before each."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """tokens (B, S) -> logits (B, S, VOCAB)."""

    def __init__(self, num_positions: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(num_positions, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _gpt(seq_len: int) -> Case:
    def draw(generator: torch.Generator) -> tuple[Tensor, ...]:
        tokens = torch.randint(VOCAB, (BATCH, seq_len + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    return Case(
        make=lambda: GPT(seq_len),
        draw=draw,
        loss=loss,
        blocks=lambda model: list(model.blocks),
    )


class Tiny(nn.Module):
    """x (B, 16) -> (B, 16) by 500 residual steps of four parameters each."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(500))
        self.linears = nn.ModuleList(nn.Linear(16, 16) for _ in range(500))

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + linear(norm(x))
        return x


def _draw_pairs(*shape: int) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda generator: (
        torch.randn(shape, generator=generator),
        torch.randn(shape, generator=generator),
    )


def _distance(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(x), y)


CASES = {
    "mlp": Case(
        make=lambda: nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))),
        draw=_draw_pairs(256, 1024),
        loss=_distance,
        blocks=list,
    ),
    "gpts": _gpt(64),
    "gpt": _gpt(256),
    "tiny": Case(make=Tiny, draw=_draw_pairs(8, 16), loss=_distance, blocks=lambda model: []),
}
