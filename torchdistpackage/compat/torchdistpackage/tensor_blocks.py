"""Transformer blocks under the names of the earlier package, each with its serial twin.

Input is (B, N, C). Sequence parallelism cuts dim 0, which is the batch here. Whether its
input is cut is an argument of a layer, which never asks the tensor. A parallel block's parameters
are named as its twin's, with `linear` between layer and parameter where they are cut.
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
    """Both twins, in a constructor of one signature; `make` gives fc1, fc2 and drop2."""

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
        self.fc2, self.drop2 = fc2, drop2

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
    """Two linear layers on one rank; `tp_group` is accepted as by `TpMlp`, and unused.

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
    """`Mlp` with the hidden features cut over the group; `tp_group` counts for this layer only."""

    def make(self, sizes, bias, drop, tp_group, sequence_parallel):
        group = tp_group or get_tp_group()
        fin, hidden, out = sizes
        return (
            ColParallelLinear(fin, hidden, bias, sequence_parallel, tp_group=group),
            RowParallelLinear(hidden, out, bias, sequence_parallel, tp_group=group),
            Dropout(drop, split=sequence_parallel, group=group),
        )


class _SelfAttention(nn.Module):
    """forward of both twins: `heads_here` heads, with dropout masks alike or of each rank's own."""

    mask_group: Group | None = None

    def __init__(self, heads_here: int, attn_drop: float):
        super().__init__()
        self.heads_here, self.attn_drop = heads_here, attn_drop

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
    """`Attention` with the heads cut over the group; `tp_group` counts for this layer only."""

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
        """Take my part of every weight and bias of the serial twin.

        Raises:
            LayoutError: the twin has other sizes.
        """
        whole = dict(block.named_parameters())
        mesh = Mesh(((self.axis, self.group.size()),))
        layouts = collect(self)
        for name, parameter in self.named_parameters():
            full = whole[name.replace(".linear.", ".")]
            copy_part(parameter, full, layouts[name], mesh, self.group.rank())


class Transformer(nn.Module):
    """`depth` blocks: x (B, N, dim), whole and equal on all ranks, to the same.

    sequence_parallel: with tensor_parallel, activations between are cut along dim 0. An `x`
        noted as cut (`set_sequence_parallel_attr`) is taken as it is.
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
            return self._through(x)
        group = self.blocks[0].group
        x = self._through(maybe_split_into_sequence_parallel(x, group=group))
        # what follows is the same on all ranks, so my part's gradient is a slice
        return gather_from_sequence_parallel_region(x, False, group=group)

    def _through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x
