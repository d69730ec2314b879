"""A transformer block of split layers, for tests that need one without a model around it."""

from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.parallel.tensor.attention import ParallelAttention
from torchdistpackage.parallel.tensor.linear import ParallelMlp
from torchdistpackage.parallel.tensor.norm import LayerNorm


class SplitBlock(nn.Module):
    """x (S, B, 8) to the same; cut along S when sequence-parallel."""

    def __init__(self, sequence_parallel: bool = False, group: Group | None = None):
        super().__init__()
        self.ln_1 = LayerNorm(8, sequence_parallel=sequence_parallel, group=group)
        self.attn = ParallelAttention(8, 2, sequence_parallel=sequence_parallel, group=group)
        self.ln_2 = LayerNorm(8, sequence_parallel=sequence_parallel, group=group)
        self.mlp = ParallelMlp(8, 16, sequence_parallel=sequence_parallel, group=group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))
