"""Stages of many kinds for the split backward, and which of their parameters wait for its W."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

DIM = 6


class Block(nn.Module):
    """A transformer's: norms, attention, a row without bias, residuals."""

    def __init__(self, dim: int = DIM, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        shape = batch, length, self.heads, dim // self.heads
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Of(nn.Module):
    """`function` of a module's parts, as its forward."""

    def __init__(self, function: Callable, **parts: object):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor):
        return self.function(self, x)


class Doubled(torch.autograd.Function):
    """A user's own product."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


def linear(**more: object) -> nn.Linear:
    return nn.Linear(DIM, DIM, **more)


def matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def autocast(module: Of, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module.a(module.a(x)) + module.block(x)


def compiled() -> nn.Module:
    block = Block()
    block.compile(backend="aot_eager")
    return block


MATRICES = ["qkv.weight", "qkv.bias", "out.weight", "up.weight", "up.bias", "down.weight"]
MATRICES += ["down.bias"]

CASES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    # what is built, and the names of the parameters that wait
    "block": (Block, MATRICES),
    "two blocks": (
        lambda: nn.Sequential(Block(), Block()),
        [f"{i}.{n}" for i in "01" for n in MATRICES],
    ),
    "one layer twice": (
        lambda: Of(lambda s, x: s.a(s.b(s.a(x).tanh()).tanh()), a=linear(), b=linear()),
        ["a.weight", "a.bias", "b.weight", "b.bias"],
    ),
    "a layer whose weight is also added": (
        lambda: Of(lambda s, x: s.b(s.a(x) + s.a.weight[0]), a=linear(), b=linear()),
        ["a.bias", "b.weight", "b.bias"],
    ),
    "a chain of shared weights": (
        lambda: Of(
            lambda s, x: s.e(x @ (s.a @ s.b) + (x @ (s.b @ s.c)) * s.c[0]),
            **{n: matrix(DIM, DIM) for n in "abc"},
            e=linear(),
        ),
        ["e.weight", "e.bias"],
    ),
    "a product of weights": (
        lambda: Of(
            lambda s, x: s.c(x @ (s.a @ s.b)), a=matrix(DIM, 2), b=matrix(2, DIM), c=linear()
        ),
        ["c.weight", "c.bias"],
    ),
    "a product of weights is added": (
        lambda: Of(
            lambda s, x: torch.addmm(s.c(x[0]), s.a, s.b),
            a=matrix(3, 2),
            b=matrix(2, DIM),
            c=linear(),
        ),
        ["c.weight", "c.bias"],
    ),
    "weight first": (
        lambda: Of(
            lambda s, x: s.a @ x[0] @ s.b + s.a.t() @ x[1], a=matrix(3, 3), b=matrix(DIM, DIM)
        ),
        ["a", "b"],
    ),
    "addmm with factors": (
        lambda: Of(
            lambda s, x: torch.addmm(s.b, x[0], s.a, beta=0.5, alpha=2),
            a=matrix(DIM, 4),
            b=matrix(4),
        ),
        ["a", "b"],
    ),
    "experts": (lambda: Of(lambda s, x: x.bmm(s.a).bmm(s.a), a=matrix(2, DIM, DIM)), ["a"]),
    "convolutions": (
        lambda: Of(
            lambda s, x: s.c(s.b(s.a(x).relu()).relu()[..., None]),
            a=nn.Conv1d(3, 4, 3),
            b=nn.ConvTranspose1d(4, 6, 3, stride=2, bias=False),
            c=nn.Conv2d(6, 6, (3, 1), padding=(1, 0), groups=3),
        ),
        ["a.weight", "a.bias", "b.weight", "c.weight", "c.bias"],
    ),
    "weight norm": (
        lambda: nn.Sequential(weight_norm(linear()), nn.Tanh(), weight_norm(linear())),
        ["0.bias", "2.bias"],
    ),
    "frozen and unused": (
        lambda: Of(
            lambda s, x: s.b(s.a(x)), a=linear().requires_grad_(False), b=linear(), unused=linear()
        ),
        ["b.weight", "b.bias"],
    ),
    "two outputs": (
        lambda: Of(lambda s, x: (s.a(x), s.b(x).sum(), s.a.bias * 2), a=linear(), b=linear()),
        ["a.weight", "b.weight", "b.bias"],
    ),
    "input and parameter are outputs": (
        lambda: Of(lambda s, x: (x, s.a(x), s.b), a=linear(), b=matrix(2)),
        ["a.weight", "a.bias"],
    ),
    "autocast": (
        lambda: Of(autocast, a=linear(), block=Block()),
        ["a.weight", "a.bias", *(f"block.{n}" for n in MATRICES)],
    ),
    "autograd function": (
        lambda: Of(lambda s, x: Doubled.apply(s.a(x), s.b), a=linear(), b=matrix(DIM, DIM)),
        ["a.weight", "a.bias"],
    ),
    "compiled": (compiled, []),
    "checkpoint": (
        lambda: Of(
            lambda s, x: s.a(checkpoint(s.b, x, use_reentrant=False)), a=linear(), b=Block()
        ),
        # a bias needs nothing that would have to be computed again
        ["a.weight", "a.bias", "b.qkv.bias", "b.up.bias", "b.down.bias"],
    ),
    "reentrant checkpoint": (
        lambda: Of(lambda s, x: s.a(checkpoint(s.b, x, use_reentrant=True)), a=linear(), b=Block()),
        [],
    ),
    "reentrant checkpoint beside the way": (
        lambda: Of(
            lambda s, x: s.a(x) + checkpoint(s.b, s.query, use_reentrant=True),
            a=linear(),
            b=Block(),
            query=matrix(2, 3, DIM),
        ),
        [],
    ),
    "saved on the host": (
        lambda: Of(_offloaded, a=linear(), b=linear()),
        ["a.bias", "b.weight", "b.bias"],
    ),
}


def _offloaded(module: Of, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        x = module.a(x)
    return module.b(x)


def build(case: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    module = CASES[case][0]()
    return module if case == "autocast" else module.to(dtype)


def microbatch(m: int, module: nn.Module) -> Tensor:
    draw = torch.Generator().manual_seed(m)
    like = next(module.parameters())
    return torch.randn(2, 3, DIM, generator=draw).to(like.dtype).requires_grad_()


def forward(module: nn.Module, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, and gradients for them."""
    outputs = module(x)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    draw = torch.Generator().manual_seed(9)
    return outputs, [torch.randn(o.shape, generator=draw).to(o.dtype) for o in outputs]
