"""One block of a transformer, tensor-parallel in four ways, with the same weights.

Pre-norm: x + out(attention(qkv(norm1(x)))), then x + down(gelu(up(norm2(x)))), causal. Under
sequence parallelism x is a rank's rows, without it x is whole. A side is a function of x.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torchdistpackage.parallel.tensor.attention import ParallelAttention
from torchdistpackage.parallel.tensor.linear import ParallelMlp
from torchdistpackage.parallel.tensor.norm import LayerNorm

Block = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Sizes of a block and its input, and how often a turn calls it."""

    dim: int
    heads: int
    seq_len: int
    batch: int
    calls: int


CASES = {
    "d 64": Case(64, 4, 16, 1, 30),
    "d 384": Case(384, 6, 256, 2, 3),
    "d 512": Case(512, 8, 1024, 2, 1),
}


class Plain(nn.Module):
    """In one process; x is (S, B, D), as ours has it, or (B, S, D) with batch first."""

    def __init__(self, case: Case, batch_first: bool):
        super().__init__()
        self.head_dim, self.batch_first = case.dim // case.heads, batch_first
        self.norm1, self.norm2 = nn.LayerNorm(case.dim), nn.LayerNorm(case.dim)
        self.q, self.k, self.v, self.out = (nn.Linear(case.dim, case.dim) for _ in range(4))
        self.up, self.down = nn.Linear(case.dim, 4 * case.dim), nn.Linear(4 * case.dim, case.dim)

    def attention(self, x: Tensor) -> Tensor:
        parts = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v))
        order, back = ((0, 2, 1, 3),) * 2 if self.batch_first else ((1, 2, 0, 3), (2, 0, 1, 3))
        q, k, v = (part.permute(order) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.permute(back).flatten(2))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def make_plain(case: Case, batch_first: bool = False) -> Plain:
    torch.manual_seed(0)
    return Plain(case, batch_first)


# -- torch ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    """A module of its own, whose input `PrepareModuleInput` gathers once for q, k, v."""

    def __init__(self, plain: Plain):
        super().__init__()
        self.q, self.k, self.v, self.out = plain.q, plain.k, plain.v, plain.out
        self.head_dim, self.batch_first = plain.head_dim, plain.batch_first

    forward = Plain.attention


class Mlp(nn.Module):
    def __init__(self, plain: Plain):
        super().__init__()
        self.up, self.down = plain.up, plain.down

    forward = Plain.mlp


class TorchBlock(nn.Module):
    def __init__(self, plain: Plain):
        super().__init__()
        self.norm1, self.norm2 = plain.norm1, plain.norm2
        self.attention, self.mlp = Attention(plain), Mlp(plain)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def dtensor(case: Case, sequence: bool) -> Block:
    """`parallelize_module` with the plan of torch's tutorial on tensor parallelism."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    block, row = TorchBlock(make_plain(case, batch_first=True)), RowwiseParallel()
    columns = dict.fromkeys(("attention.q", "attention.k", "attention.v", "mlp.up"))
    plan = {name: ColwiseParallel() for name in columns}
    if not sequence:
        parallelize_module(block, mesh, {**plan, "attention.out": row, "mlp.down": row})
        return lambda x: block(x.transpose(0, 1)).transpose(0, 1)
    rows = Shard(1)
    scattered = RowwiseParallel(output_layouts=rows)
    gathered = {
        name: PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(Replicate(),))
        for name in ("attention", "mlp")
    }
    norms = {name: SequenceParallel() for name in ("norm1", "norm2")}
    out = {"attention.out": scattered, "mlp.down": scattered}
    parallelize_module(block, mesh, {**plan, **out, **gathered, **norms})

    return lambda x: block(x.transpose(0, 1)).transpose(0, 1)


# -- autograd functions by hand --------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def _gather(x: Tensor) -> Tensor:
    out = x.new_empty((x.shape[0] * dist.get_world_size(), *x.shape[1:]))
    dist.all_gather_single(out, x.contiguous())
    return out


def _scatter(x: Tensor) -> Tensor:
    out = x.new_empty((x.shape[0] // dist.get_world_size(), *x.shape[1:]))
    dist.reduce_scatter_single(out, x.contiguous())
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return _gather(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return _scatter(grad)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return _scatter(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return _gather(grad)


class _SumGradients(torch.autograd.Function):
    """Of parameters that every rank applies to its own rows, in one message."""

    @staticmethod
    def forward(ctx, *parameters: Tensor) -> tuple[Tensor, ...]:
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, ...]:
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        sums = flat.split([grad.numel() for grad in grads])
        return tuple(x.view_as(grad) for x, grad in zip(sums, grads, strict=True))


def by_hand(case: Case, sequence: bool) -> Block:
    """Megatron-LM's f and g, each a collective of torch's own, and the product between them. Under
    sequence parallelism gradients of norms and of biases of row products are sums, as there."""
    plain, into, out_of = make_plain(case), _Copy, _Reduce
    if sequence:
        into, out_of = _Gather, _Scatter
    size, rank = dist.get_world_size(), dist.get_rank()

    def column(*layers: nn.Linear) -> tuple[Tensor, Tensor]:
        weights = torch.cat([layer.weight.detach().chunk(size)[rank] for layer in layers])
        biases = torch.cat([layer.bias.detach().chunk(size)[rank] for layer in layers])
        return weights.requires_grad_(), biases.requires_grad_()

    def row(layer: nn.Linear) -> tuple[Tensor, nn.Parameter]:
        return layer.weight.detach().chunk(size, 1)[rank].clone().requires_grad_(), layer.bias

    qkv, up = column(plain.q, plain.k, plain.v), column(plain.up)
    out, down = row(plain.out), row(plain.down)

    whole = (plain.norm1.weight, plain.norm1.bias, plain.norm2.weight, plain.norm2.bias)
    whole += out[1], down[1]

    def call(x: Tensor) -> Tensor:
        w1, b1, w2, b2, out_bias, down_bias = _SumGradients.apply(*whole) if sequence else whole
        dims = (case.dim,)
        y = F.linear(into.apply(F.layer_norm(x, dims, w1, b1)), *qkv)
        q, k, v = y.unflatten(-1, (3, -1, plain.head_dim)).permute(2, 1, 3, 0, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + out_of.apply(F.linear(mixed.permute(2, 0, 1, 3).flatten(2), out[0])) + out_bias
        y = F.gelu(F.linear(into.apply(F.layer_norm(x, dims, w2, b2)), *up))
        return x + out_of.apply(F.linear(y, down[0])) + down_bias

    return call


# -- ours ------------------------------------------------------------------------------------------


class OurBlock(nn.Module):
    def __init__(self, case: Case, sequence: bool, overlap: bool):
        super().__init__()
        plain = make_plain(case)
        how = {"sequence_parallel": sequence}
        self.norm1, self.norm2 = (
            LayerNorm(case.dim, **how).from_full(norm) for norm in (plain.norm1, plain.norm2)
        )
        products = {**how, "tp_comm_overlap": overlap}
        self.attention = ParallelAttention(case.dim, case.heads, causal=True, **products)
        whole = {
            f"qkv.{name}": torch.cat(
                [getattr(layer, name) for layer in (plain.q, plain.k, plain.v)]
            )
            for name in ("weight", "bias")
        }
        self.attention.from_full(
            {**whole, "out.weight": plain.out.weight, "out.bias": plain.out.bias}
        )
        self.mlp = ParallelMlp(case.dim, 4 * case.dim, **products).from_full(
            {name: p for name, p in plain.named_parameters() if name.startswith(("up.", "down."))}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def ours(case: Case, sequence: bool) -> Block:
    return OurBlock(case, sequence, overlap=False)


def overlapped(case: Case, sequence: bool) -> Block:
    return OurBlock(case, sequence, overlap=True)


SIDES: dict[str, Callable[[Case, bool], Block]] = {
    "DTensor": dtensor,
    "by hand": by_hand,
    "ours": ours,
    "ours, tp_comm_overlap": overlapped,
}
