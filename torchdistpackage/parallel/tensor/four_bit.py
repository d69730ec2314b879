"""Frozen weights of linear layers in 4 bits (QLoRA: Dettmers et al., arXiv:2305.14314) or 8 bits.

In 8 bits each row of outputs has a scale, as in LLM.int8() (Dettmers et al., arXiv:2208.07339),
whose activations are rounded as well; here they are not. In 4 bits each block has one:
bitsandbytes, of the extra `int8`, quantizes and packs them. Each matmul unpacks its weight again,
forward and backward, so that no pass keeps a wide one. Matmuls are torch's own, in the type of x:
in float64 those of bitsandbytes are wrong. Its kernels differ by processor, so each is compared
with the code book before the first weight is packed, and a table lookup replaces a wrong one.
"""

import math
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import ConfigError
from torchdistpackage.layout.derive import local_slices
from torchdistpackage.layout.four_bit import BLOCK_SIZE, SCALES_PER_BLOCK, PackedFormat
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.mesh import Mesh

Kind = tuple[str, torch.dtype, str]
"""Key of a bitsandbytes kernel: (kind of device, dtype of the weight, quant_type)."""
_CHECKED: dict[Kind, "KernelVerdict"] = {}
_MOST = 127.0
"""Largest value in 8 bits."""
_STEP = 7.874015718698502e-3
"""1 / 127 as bitsandbytes rounds it, so that values have its bits."""
_ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Largest relative error of a correct kernel; its result may be rounded differently."""


@dataclass(frozen=True, slots=True)
class KernelVerdict:
    """The result of a test of a bitsandbytes kernel on this processor against the code book.

    by_rows: correct for full matrices; by_blocks: correct if every row is one block.
    """

    by_rows: bool
    by_blocks: bool


@dataclass(frozen=True, slots=True)
class PackedShard:
    """This rank's shard of a matrix that the ranks of `group` share, at `index` of `mesh`. inputs:
    the dim of the input features.
    """

    layout: Layout
    inputs: int
    mesh: Mesh
    index: int
    group: Group

    def block_numbers(self, device: torch.device) -> Tensor:
        """Return the number in the full matrix of each block of this shard."""
        slices = local_slices(self.layout, self.mesh, self.index)
        columns, rows = (
            torch.cat([torch.arange(x.start, x.stop, device=device) for x in slices[dim]])
            for dim in (self.inputs, 1 - self.inputs)
        )
        starts = torch.arange(0, len(rows) * len(columns), BLOCK_SIZE, device=device)
        places = rows[starts // len(columns)] * self.layout.shape[self.inputs]
        return (places + columns[starts % len(columns)]) // BLOCK_SIZE

    def join(self, absmax: Tensor) -> Tensor:
        """Return the scales of the full matrix from those of this shard, on all ranks."""
        full = absmax.new_zeros(-(-math.prod(self.layout.shape) // BLOCK_SIZE))
        full[self.block_numbers(absmax.device)] = absmax
        # none is negative, and ranks that share heads have some of them twice
        return primitives.all_reduce(full, self.group, primitives.MAX)


@dataclass(frozen=True, slots=True)
class DoubleScales:
    """The scales of blocks in 8 bits: an index into `code` for each, times the scale of
    `SCALES_PER_BLOCK` of them, plus the mean of all.

    scales: of the full matrix. shard: this rank's, whose blocks alone have indices.
    """

    indices: Tensor
    scales: Tensor
    code: Tensor
    mean: Tensor
    shard: PackedShard | None = None

    @classmethod
    def of(cls, absmax: Tensor, shard: PackedShard | None = None) -> "DoubleScales":
        from bitsandbytes.functional import quantize_blockwise

        if shard is not None:
            absmax = shard.join(absmax)
        mean = absmax.mean()
        indices, state = quantize_blockwise(absmax - mean, blocksize=SCALES_PER_BLOCK)
        if shard is not None:
            indices = indices[shard.block_numbers(indices.device)]
        return cls(indices, state.absmax, state.code, mean, shard)

    def wide(self) -> Tensor:
        """Return the scales of this rank's blocks in float32."""
        if self.shard is None:
            scales = self.scales.repeat_interleave(SCALES_PER_BLOCK)[: self.indices.numel()]
        else:
            numbers = self.shard.block_numbers(self.indices.device)
            scales = self.scales[numbers // SCALES_PER_BLOCK]
        return self.code[self.indices.int()] * scales + self.mean

    @property
    def num_bytes(self) -> int:
        """Bytes of one weight; `code` is the same for all."""
        return self.indices.nbytes + self.scales.nbytes + self.mean.nbytes


@dataclass(frozen=True, slots=True)
class PackedState:
    """The state that `unpacked` needs besides the values of a weight of this shape in 4 bits.

    blocks: the QuantState of bitsandbytes, over rows of one block. has_kernel: bitsandbytes' kernel
    is correct for these; otherwise a table lookup replaces it. double: the scales, where `blocks`
    has none.
    """

    blocks: Any
    shape: torch.Size
    has_kernel: bool
    double: DoubleScales | None = None

    @property
    def absmax(self) -> Tensor:
        return self.blocks.absmax if self.double is None else self.double.wide()

    @property
    def num_bytes(self) -> int:
        """Bytes of the scales."""
        return self.absmax.nbytes if self.double is None else self.double.num_bytes

    def with_scales(self) -> Any:
        """Return the QuantState with scales in float32."""
        if self.double is None:
            return self.blocks
        state = copy(self.blocks)
        state.absmax = self.double.wide()
        return state


@dataclass(frozen=True, slots=True)
class RowState:
    """The largest absolute value of each row of a weight in 8 bits."""

    absmax: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the scales."""
        return self.absmax.nbytes


def packed(
    weight: Tensor,
    packing: PackedFormat,
    group: Group | None = None,
    shard: PackedShard | None = None,
) -> tuple[Tensor, PackedState | RowState]:
    """Return weight (Dout, Din) in 4 bits, two elements per byte, or 8, and the state that unpacks
    it. A weight in float64 is first rounded to float32.

    group: ranks that each have a part of every row; None: this one has whole rows. shard: of which
    matrix this is one, if of any; all its ranks call this where scales are quantized too.

    Raises:
        ConfigError: bitsandbytes cannot do it on this device.
    """
    # the kernels of bitsandbytes take no float64
    wide = weight.detach().float() if weight.dtype == torch.float64 else weight.detach()
    if packing.bits == 8:
        return _packed_by_rows(wide.float(), group)
    verdict = checked_kernel(wide.device, wide.dtype, packing.quant_type)
    values, state = _quantized(wide.contiguous(), packing.quant_type)
    values, double = _in_blocks(values, state), None
    if packing.double_quant:
        double, state.absmax = DoubleScales.of(state.absmax, shard), None
    return values, PackedState(state, weight.shape, verdict.by_blocks, double)


def _packed_by_rows(wide: Tensor, group: Group | None) -> tuple[Tensor, RowState]:
    absmax = wide.abs().amax(dim=1)
    if group is not None:
        absmax = primitives.all_reduce(absmax, group, primitives.MAX)
    # a row of zeros has no scale
    factor = torch.where(absmax > 0, _MOST / absmax, torch.zeros_like(absmax))
    return torch.round(wide * factor[:, None]).to(torch.int8), RowState(absmax)


def unpacked(values: Tensor, state: PackedState | RowState, dtype: torch.dtype) -> Tensor:
    """Return the quantized weight (Dout, Din) in a wide dtype.

    The kernel sees rows of one block each: bitsandbytes 0.50 on CPUs with AVX-512 reads the scale
    of a wrong block where the length of a row is not a multiple of the block, and compiles a kernel
    for every matrix whose rows are odd.
    """
    if isinstance(state, RowState):
        return (values * state.absmax[:, None] * _STEP).to(dtype)
    from bitsandbytes.functional import dequantize_4bit

    has_kernel = state.has_kernel
    wide = dequantize_4bit(values, state.with_scales()) if has_kernel else _looked_up(values, state)
    # the matmul is in the dtype of its input
    return wide.flatten()[: state.shape.numel()].view(state.shape).to(dtype)


def checked_kernel(device: torch.device, dtype: torch.dtype, quant_type: str) -> KernelVerdict:
    """Compare bitsandbytes' kernel with the code book, once for each kind of weight."""
    kind = device.type, dtype, quant_type
    if kind not in _CHECKED:
        _CHECKED[kind] = _compared(device, dtype, quant_type)
    return _CHECKED[kind]


def kernel_notes() -> list[str]:
    """Return a line for each bitsandbytes kernel that this process has found to be wrong."""
    if not _CHECKED:
        return []
    from bitsandbytes import __version__

    return [
        f"dequantize_4bit of bitsandbytes {__version__} returns wrong values on this processor for "
        f"{quant_type} in {str(dtype).removeprefix('torch.')} on {device}"
        + (" where a row is not a multiple of 64" if verdict.by_blocks else "")
        + f"; this run unpacks weights by {'blocks' if verdict.by_blocks else 'a table'}, which is "
        "right, but a model that transformers loads in 4 bits here is wrong"
        for (device, dtype, quant_type), verdict in _CHECKED.items()
        if not verdict.by_rows
    ]


@torch.no_grad()
def _compared(device: torch.device, dtype: torch.dtype, quant_type: str) -> KernelVerdict:
    from bitsandbytes.functional import dequantize_4bit

    def is_right(rows: int, columns: int, by_blocks: bool) -> bool:
        # steps that no period of blocks, rows or vector registers divides
        number = torch.arange(rows * columns, dtype=torch.float32)
        wide = ((number * 0.6180339887) % 2 - 1) * (1 + number % 101)
        values, state = _quantized(wide.view(rows, columns).to(device, dtype), quant_type)
        if by_blocks:
            values = _in_blocks(values, state)
        decoded = dequantize_4bit(values, state).flatten()
        expected = _looked_up(values, PackedState(state, torch.Size([rows, columns]), False))
        # compared in float32, because a difference of 16-bit numbers would be rounded too
        error = (
            decoded.float() - (expected := expected.flatten()[: decoded.numel()].float())
        ).abs()
        return bool((error <= _ROUNDING[dtype] * expected.abs() + 1e-30).all())

    odd = ((6, 96), (8, 32), (6, 160), (100, 48))
    return KernelVerdict(
        by_rows=all(is_right(*shape, False) for shape in (*odd, (5, 192))),
        by_blocks=all(is_right(*shape, True) for shape in (*odd, (3, 7), (67, 192))),
    )


def _quantized(wide: Tensor, quant_type: str) -> tuple[Tensor, Any]:
    from bitsandbytes import __version__
    from bitsandbytes.functional import quantize_4bit

    try:
        return quantize_4bit(
            wide, blocksize=BLOCK_SIZE, compress_statistics=False, quant_type=quant_type
        )
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"model.lora.load_in_4bit: bitsandbytes {__version__} packs no weights on "
            f"{wide.device.type} ({error}); install a build for it, or set load_in_4bit to false"
        ) from error


def _in_blocks(values: Tensor, state: Any) -> Tensor:
    """Return values (bytes, 1) with the last block filled up, as rows of one block each."""
    num_blocks = state.absmax.numel()
    state.shape = torch.Size([num_blocks, BLOCK_SIZE])
    return F.pad(values, (0, 0, 0, num_blocks * BLOCK_SIZE // 2 - values.shape[0]))


def _looked_up(values: Tensor, state: PackedState) -> Tensor:
    """Unpack with the code book only: element 2i is the high half of byte i."""
    # in float32, as bitsandbytes multiplies the code by the scale
    code, scale = state.blocks.code.float(), state.absmax
    pairs = torch.stack((code.repeat_interleave(16), code.repeat(16)), dim=-1)
    wide = pairs[values.flatten().int()].flatten()
    missing = scale.numel() * BLOCK_SIZE - wide.numel()
    return (F.pad(wide, (0, missing)).view(-1, BLOCK_SIZE) * scale[:, None]).to(state.blocks.dtype)


class _ProductOfPacked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, state: Any) -> Tensor:
        ctx.save_for_backward(values)
        ctx.state = state
        return F.linear(x, unpacked(values, state, x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (values,) = ctx.saved_tensors
        return grad @ unpacked(values, ctx.state, grad.dtype), None, None


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """`torch.nn.functional.linear` of x (..., Din) and a weight that `packed` made."""

    state: PackedState | RowState

    def __call__(self, x: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            # a custom function is not seen by autocast, which would cast the matmul of nn.Linear
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        y = _ProductOfPacked.apply(x, values, self.state)
        return y if bias is None else y + bias


class PackedLinear(nn.Module):
    """A full linear layer that has, or will have, a packed weight (`pack_weight`)."""

    product: PackedProduct

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


def pack_weight(
    layer: Any,
    weight: Tensor,
    packing: PackedFormat,
    group: Group | None = None,
    shard: PackedShard | None = None,
) -> None:
    """Make a `PackedLinear`, a ColumnLinear or a RowLinear multiply by this weight (Dout, Din) in 4
    or 8 bits. group, shard: as of `packed`.

    The weight becomes a buffer, unknown to optimizers, gradient reduction and checkpoints."""
    values, state = packed(weight, packing, group, shard)
    del layer.weight
    layer.register_buffer("weight", values, persistent=False)
    layer.product = PackedProduct(state)
