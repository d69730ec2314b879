"""Transformer blocks under the names of the earlier package, each with its serial twin.

Input is (B, N, C). Sequence parallelism cuts dim 0, which is the batch here. An argument tells a
layer whether its input is cut; it never asks the tensor. A parallel block's parameters have the
names of its twin's, with `linear` between layer and parameter if they are cut.
"""

from collections.abc import Callable

from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.compat.torchdistpackage.tensor_layers import (
    ColParallelLinear,
    RowParallelLinear,
    TpLinear,
    gather_from_sequence_parallel_region,
    get_tp_group,
    maybe_split_into_sequence_parallel,
)
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.mark import collect
from torchdistpackage.parallel.tensor.attention import attend
from torchdistpackage.parallel.tensor.dropout import Dropout
from torchdistpackage.parallel.tensor.full import copy_part
from torchdistpackage.parallel.tensor.layouts import heads_per_rank
from torchdistpackage.parallel.tensor.marked import Grouped
from torchdistpackage.parallel.tensor.norm import LayerNorm
from torchdistpackage.topology.mesh import Mesh


class _TwoLayers(nn.Module):
    """The base of both MLPs, with one constructor; `make` returns fc1, fc2 and drop2."""

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act_layer: Callable[[], nn.Module] = nn.GELU,
        tp_group: Group | None = None,
        bias: bool = True,
        drop: float = 0.0,
        sequence_parallel: bool = False,
    ):
        super().__init__()
        sizes = (in_features, hidden_features or in_features, out_features or in_features)
        fc1, fc2, drop2 = self.make(sizes, bias, drop, tp_group, sequence_parallel)
        self.fc1 = fc1
        self.act = act_layer()
        self.fc2 = fc2
        self.drop2 = drop2

    def make(
        self,
        sizes: tuple[int, int, int],
        bias: bool,
        drop: float,
        tp_group: Group | None,
        sequence_parallel: bool,
    ) -> tuple[nn.Module, nn.Module, nn.Module]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.act(self.fc1(x))))


class Mlp(_TwoLayers):
    """Two linear layers on one rank; takes `tp_group` for the signature of `TpMlp` and ignores it.

    Raises:
        LayoutError: `sequence_parallel`, which needs a group.
    """

    def make(self, sizes, bias, drop, tp_group, sequence_parallel):
        if sequence_parallel:
            raise LayoutError(
                "Mlp computes on one rank, so sequence_parallel=True has no group to cut over; "
                "use TpMlp"
            )
        fin, hidden, out = sizes
        return TpLinear(fin, hidden, bias), TpLinear(hidden, out, bias), nn.Dropout(drop)


class TpMlp(_TwoLayers):
    """`Mlp` with the hidden features split over the group; `tp_group`: of this layer only."""

    def make(self, sizes, bias, drop, tp_group, sequence_parallel):
        group = tp_group or get_tp_group()
        fin, hidden, out = sizes
        return (
            ColParallelLinear(fin, hidden, bias, sequence_parallel, tp_group=group),
            RowParallelLinear(hidden, out, bias, sequence_parallel, tp_group=group),
            Dropout(drop, split=sequence_parallel, group=group),
        )


class _SelfAttention(nn.Module):
    """The forward of both attentions: `heads_here` heads, dropout masks shared or per rank."""

    mask_group: Group | None = None

    def __init__(self, heads_here: int, attn_drop: float):
        super().__init__()
        self.heads_here = heads_here
        self.attn_drop = attn_drop

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        # (B, N, 3 h d) -> three of (B, h, N, d)
        q, k, v = qkv.unflatten(-1, (3, self.heads_here, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.attn_drop if self.training else 0.0
        mixed = attend(q, k, v, False, dropout, self.mask_group)
        return self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2)))


class Attention(_SelfAttention):
    """Self-attention on one rank, (B, N, dim) to (B, N, dim)."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ):
        super().__init__(heads_per_rank(dim, num_heads, 1, "Attention"), attn_drop)
        self.qkv = TpLinear(dim, 3 * dim, qkv_bias)
        self.proj = TpLinear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)


class TpAttention(_SelfAttention):
    """`Attention` with the heads split over the group; `tp_group`: of this layer only."""

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        tp_group: Group | None = None,
        sequence_parallel: bool = False,
    ):
        group = tp_group or get_tp_group()
        heads = heads_per_rank(dim, num_heads, group.size(), "TpAttention")
        super().__init__(heads, attn_drop)
        self.qkv = ColParallelLinear(
            dim, 3 * dim, qkv_bias, sequence_parallel, parts=(dim, dim, dim), tp_group=group
        )
        self.proj = RowParallelLinear(dim, dim, True, sequence_parallel, tp_group=group)
        self.proj_drop = Dropout(proj_drop, split=sequence_parallel, group=group)

    @property
    def mask_group(self) -> Group:
        return self.qkv.group


class Block(nn.Module):
    """Pre-norm transformer block on one rank, (B, N, dim) to (B, N, dim)."""

    def __init__(self, dim: int, mlp_ratio: float = 4, num_heads: int = 8):
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ParallelBlock(Grouped):
    """`Block` over the group. Sequence-parallel, its input and output are cut along dim 0."""

    def __init__(
        self,
        dim: int,
        mlp_ratio: float = 4,
        num_heads: int = 8,
        sequence_parallel: bool = False,
        *,
        tp_group: Group | None = None,
    ):
        super().__init__(tp_group or get_tp_group())
        cut = {"tp_group": self.group, "sequence_parallel": sequence_parallel}
        norm = {"group": self.group, "sequence_parallel": sequence_parallel}
        self.ln_1 = LayerNorm(dim, **norm)
        self.attn = TpAttention(dim, num_heads, **cut)
        self.ln_2 = LayerNorm(dim, **norm)
        self.mlp = TpMlp(dim, int(dim * mlp_ratio), **cut)

    forward = Block.forward

    def init_from_full(self, block: Block) -> None:
        """Copy this rank's slice of every weight and bias of the serial twin.

        Raises:
            LayoutError: the twin has other sizes.
        """
        full_parameters = dict(block.named_parameters())
        mesh = Mesh(((self.axis, self.group.size()),))
        layouts = collect(self)
        for name, parameter in self.named_parameters():
            full = full_parameters[name.replace(".linear.", ".")]
            copy_part(parameter, full, layouts[name], mesh, self.group.rank())


class Transformer(nn.Module):
    """A stack of `depth` blocks; input and output (B, N, dim) are equal on all ranks.

    sequence_parallel: with tensor_parallel, activations between blocks are cut along dim 0. An `x`
        that is noted as cut (`set_sequence_parallel_attr`) is not cut again.
    """

    def __init__(
        self,
        dim: int,
        mlp_ratio: float = 4,
        num_heads: int = 8,
        depth: int = 12,
        tensor_parallel: bool = True,
        sequence_parallel: bool = True,
        *,
        tp_group: Group | None = None,
    ):
        super().__init__()
        self.sequence_parallel = tensor_parallel and sequence_parallel

        def block() -> nn.Module:
            if not tensor_parallel:
                return Block(dim, mlp_ratio, num_heads)
            return ParallelBlock(dim, mlp_ratio, num_heads, sequence_parallel, tp_group=tp_group)

        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel or not self.blocks:
            return self._run_blocks(x)
        group = self.blocks[0].group
        x = self._run_blocks(maybe_split_into_sequence_parallel(x, group=group))
        # all ranks continue with the same work, so each takes its slice of the gradient
        return gather_from_sequence_parallel_region(x, False, group=group)

    def _run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
