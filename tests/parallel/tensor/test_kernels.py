"""How many kernels a block launches beside the same block without communication.

On a GPU each is a launch that the host pays for. Counted by a dispatcher mode: what only looks at
memory in another way (views, allocations) is none, and of a collective all that it needs besides
the call itself, such as a copy of parts into one buffer, is one at most.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.parallel.tensor.attention import ParallelAttention
from torchdistpackage.parallel.tensor.linear import ParallelMlp
from torchdistpackage.parallel.tensor.norm import LayerNorm

DIM, HEADS, LENGTH = 16, 4, 8
LOOKS = {"detach", "alias", "lift_fresh", "_unsafe_view", "empty", "empty_like", "new_empty"}


class Kernels(TorchDispatchMode):
    """Counts what is computed, and collectives; those of c10d and of this package are no kernels
    of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: list[str] = []
        self.collectives: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name
        space, _, short = name.partition("::")
        if space != "aten":
            self.collectives.append(name)
        elif not func.is_view and short not in LOOKS:
            self.computed.append(short)
        return func(*args, **(kwargs or {}))


class Alone(nn.Module):
    """The same block in one process, with this many heads and this wide an MLP."""

    def __init__(self, heads: int, wide: int):
        super().__init__()
        self.heads, inner = heads, heads * DIM // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * inner), nn.Linear(inner, DIM)
        self.up, self.down = nn.Linear(DIM, wide), nn.Linear(wide, DIM)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 1, 3, 0, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.permute(2, 0, 1, 3).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Split(nn.Module):
    def __init__(self, sequence: bool):
        super().__init__()
        how = {"sequence_parallel": sequence}
        self.norm1, self.norm2 = LayerNorm(DIM, **how), LayerNorm(DIM, **how)
        self.attention = ParallelAttention(DIM, HEADS, causal=True, **how)
        self.mlp = ParallelMlp(DIM, 4 * DIM, **how)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def counted(module: nn.Module, x: Tensor) -> tuple[Kernels, Kernels]:
    """Of the forward, and of the backward, the second time."""
    for _ in range(2):
        with Kernels() as forward:
            y = module(x.detach().requires_grad_())
        with Kernels() as backward:
            y.backward(torch.ones_like(y))
        module.zero_grad(set_to_none=True)
    return forward, backward


def kernels(sequence: bool) -> list[tuple[list[str], list[str], list[str]]]:
    """For forward and backward what ours computes, what the plain block does, and collectives."""
    tpc.setup_process_groups([("tensor", 2)])
    size = dist.get_world_size()
    rows = LENGTH // size if sequence else LENGTH
    ours = counted(Split(sequence), torch.randn(rows, 2, DIM))
    plain = counted(Alone(HEADS // size, 4 * DIM // size), torch.randn(LENGTH, 2, DIM))
    return [(a.computed, b.computed, a.collectives) for a, b in zip(ours, plain, strict=True)]


@pytest.mark.own_transport("counts the calls of c10d, which a back end of our own does not make")
@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_launches_one_kernel_more_for_a_collective_at_most(ranks, sequence):
    for found in ranks(2).run(kernels, sequence):
        for ours, plain, collectives in found:
            assert collectives, "nothing was communicated, so nothing was counted"
            assert len(plain) > 8
            more = sorted(set(ours) - set(plain)), collectives
            assert len(ours) <= len(plain) + len(collectives), more
