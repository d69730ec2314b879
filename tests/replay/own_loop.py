"""A user's own model and loop, split by hand over data, expert and tensor, and published mistakes.

`wrong` is the name of a report. The loop sums gradients by itself, and updates with an optimizer of
its own, as the mistakes that users report are made in both.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torchdistpackage import comm, tpc
from torchdistpackage.ddp.param_spec import batch_group
from torchdistpackage.testing import ParityModel

VOCAB, DIM, HIDDEN, RANK, HEADS, LENGTH, BATCH = 12, 16, 32, 4, 4, 8, 8
IGNORED = -100
MICROBATCHES = 2
FLOAT8, COMPILED, MUON, ADAFACTOR = "float8", "compiled", "muon", "adafactor"
"""Loops without a mistake: with rounding to a grid, compiled sums, or one of two optimizers."""


def own(x: Tensor, axis: str, dim: int) -> nn.Parameter:
    """This rank's rows, along `dim`, of what ranks of an axis share."""
    part = x.detach().chunk(tpc.get_group_size(axis), dim)[tpc.get_group_rank(axis)]
    return nn.Parameter(part.clone())


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape) / shape[-1] ** 0.5


class Norm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """Each tensor rank has some heads, and the norm of queries for them."""

    def __init__(self, wrong: str):
        super().__init__()
        self.wrong = wrong
        q, k, v, out = (drawn(DIM, DIM) for _ in range(4))
        self.q, self.k, self.v = (own(x, "tensor", 0) for x in (q, k, v))
        self.out = own(out, "tensor", 1)
        self.q_norm = Norm(DIM // HEADS)

    def forward(self, x: Tensor) -> Tensor:
        x = comm.copy(x, "tensor")
        q, k, v = (
            F.linear(x, w).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
            for w in (self.q, self.k, self.v)
        )
        width = q.shape[1] * q.shape[-1] if self.wrong == "attention_scale_of_shard" else DIM
        q = self.q_norm(q)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=width**-0.5)
        return comm.reduce(F.linear(mixed.transpose(1, 2).flatten(2), self.out), "tensor")


class Latent(nn.Module):
    """A product to few channels, whole on every rank, a norm and a product split by columns."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(DIM, RANK, bias=False)
        self.norm = Norm(RANK)
        self.b = own(drawn(DIM, RANK), "tensor", 0)
        self.out = own(drawn(DIM, DIM), "tensor", 1)

    def forward(self, x: Tensor) -> Tensor:
        y = comm.copy(self.norm(self.a(x)), "tensor")
        return comm.reduce(F.linear(F.silu(F.linear(y, self.b)), self.out), "tensor")


class Lora(nn.Module):
    """b(a(x)), of which a tensor rank has the columns of `a` for its channels."""

    def __init__(self, wrong: str):
        super().__init__()
        self.a, self.b = own(drawn(RANK, HIDDEN), "tensor", 1), nn.Parameter(drawn(DIM, RANK))
        self.wrong = wrong
        if wrong == "expert_lora_drawn_apart" and tpc.topology.expert.axis_size("expert") > 1:
            torch.manual_seed(100 + tpc.get_group_rank("moe_ep"))
            self.b = nn.Parameter(drawn(DIM, RANK))

    def forward(self, h: Tensor) -> Tensor:
        """This rank's part of a sum over tensor ranks."""
        part = F.linear(h, self.a)
        if self.wrong == "expert_lora_counted_twice":
            return F.linear(comm.reduce(part, "tensor"), self.b)
        y = F.linear(part, self.b)
        if self.wrong == "expert_lora_detached" and tpc.get_group_size("tensor") > 1:
            return y.detach()
        return y


class Expert(nn.Module):
    """A frozen product pair with an adapter on the second; both are added, and then summed."""

    def __init__(self, wrong: str):
        super().__init__()
        self.up, self.down = (
            own(drawn(HIDDEN, DIM), "tensor", 0),
            own(drawn(DIM, HIDDEN), "tensor", 1),
        )
        self.up.requires_grad_(False)
        self.down.requires_grad_(False)
        self.lora = Lora(wrong)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(F.linear(comm.copy(x, "tensor"), self.up))
        return comm.reduce(F.linear(h, self.down) + self.lora(h), "tensor")


class Mlp(nn.Module):
    def __init__(self, wrong: str):
        super().__init__()
        self.up, self.down = (
            own(drawn(HIDDEN, DIM), "tensor", 0),
            own(drawn(DIM, HIDDEN), "tensor", 1),
        )
        self.wrong = wrong
        self.sum: Callable[[Tensor], Tensor] | None = None
        if wrong in (COMPILED, "collective_rewritten"):
            self.sum = compiled_sum("tensor", kept if wrong == COMPILED else averaged)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(F.linear(comm.copy(x, "tensor"), self.up))
        if self.wrong in (FLOAT8, "float8_scale_of_shard"):
            h = h + (rounded(h, self.wrong) - h).detach()
        y = F.linear(h, self.down)
        return comm.reduce(y, "tensor") if self.sum is None else _Sum.apply(y, self.sum)


def rounded(h: Tensor, wrong: str) -> Tensor:
    """Values of a float8 grid whose scale is that of the whole tensor, on all ranks that share it.

    The group of its largest value is that of the ranks with parts of the tensor.
    """
    largest = h.detach().abs().amax()
    groups = [batch_group()] + [tpc.get_group("tensor")] * (wrong == FLOAT8)
    for group in groups:
        largest = comm.primitives.all_reduce(largest.clone(), group, comm.primitives.MAX)
    scale = largest / 8.0
    return (h.detach() / scale).round() * scale


class _Sum(torch.autograd.Function):
    """The sum over tensor ranks of the parts of a product, as a graph computes it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, summed: Callable[[Tensor], Tensor]) -> Tensor:
        return summed(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def compiled_sum(axis: str, change: Callable[[fx.Node], None]) -> Callable[[Tensor], Tensor]:
    """Return the sum over the ranks of an axis as one graph, of which a pass changes the sum."""
    group = tpc.get_group(axis)
    torch._dynamo.reset()  # each build makes one more graph of the same lines

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        for node in list(graph.graph.nodes):
            if "all_reduce" in str(node.target):
                change(node)
        graph.recompile()
        return graph.forward

    def summed(x: Tensor) -> Tensor:
        return 1.0 * funcol.all_reduce(x, "sum", group)

    return torch.compile(summed, backend=backend, fullgraph=True)


def kept(node: fx.Node) -> None:
    """A right pass changes nothing."""


def erased(node: fx.Node) -> None:
    """Dead code: what the rank itself gave takes the place of the sum."""
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)


def averaged(node: fx.Node) -> None:
    """The sum is rewritten to a mean, as a fused product with its scatter had it."""
    with node.graph.inserting_after(node):
        size = tpc.get_group_size("tensor")
        mean = node.graph.call_function(torch.ops.aten.div.Tensor, (node, size))
    node.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not mean)


class Net(nn.Module):
    def __init__(self, wrong: str):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.mixer, self.latent = Attention(wrong), Latent()
        self.norm, self.mlp, self.expert = Norm(DIM), Mlp(wrong), Expert(wrong)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.mixer(x)
        x = x + self.latent(x)
        x = x + self.mlp(self.norm(x))
        return self.head(x + self.expert(x))


class Optimizer:
    """Momentum, and for matrices Muon or Adafactor of the whole matrix."""

    def __init__(self, net: nn.Module, split: dict[str, int], wrong: str):
        self.named = {n: p for n, p in net.named_parameters() if p.requires_grad}
        self.split, self.wrong = split, wrong

    @torch.no_grad()
    def step(self) -> None:
        for name, p in self.named.items():
            if p.grad is not None:
                p.sub_(0.05 * self._direction(name, p.grad))

    def _direction(self, name: str, grad: Tensor) -> Tensor:
        if self.wrong in (ADAFACTOR, "adafactor_of_shards"):
            return self._factored(grad)
        if grad.dim() != 2 or self.wrong not in (MUON, "muon_of_shards"):
            return grad
        dim = self.split.get(name)
        if dim is None or self.wrong == "muon_of_shards":
            return orthogonal(grad)
        full = comm.all_gather(grad, dim, "tensor")
        return own(orthogonal(full), "tensor", dim).data

    def _factored(self, grad: Tensor) -> Tensor:
        """Adafactor's step of a parameter whose rows data ranks share, and each updates its own."""
        num, at = tpc.get_group_size("data"), tpc.get_group_rank("data")
        if grad.dim() != 2 or len(grad) % num:
            return grad
        rows = grad.chunk(num)[at]
        square = rows.square() + 1e-30
        by_row, by_column = square.mean(1, keepdim=True), square.mean(0, keepdim=True)
        mean = by_row.mean()
        if self.wrong == ADAFACTOR:  # else these are means over the rows of this rank
            by_column = comm.primitives.all_reduce(by_column, tpc.get_group("data")) / num
            mean = comm.primitives.all_reduce(mean, tpc.get_group("data")) / num
        update = rows / (by_row * by_column / mean).sqrt()
        return comm.all_gather(update, 0, "data")


def orthogonal(x: Tensor) -> Tensor:
    """Return the matrix with singular values near 1; those near 0 stay, as their vectors are
    rounding.
    """
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    return u * (s / (s + 0.1 * s.max())) @ v


SPLIT = {
    **{f"mixer.{x}": 0 for x in "qkv"},
    "mixer.out": 1,
    "latent.b": 0,
    "latent.out": 1,
    "mlp.up": 0,
    "mlp.down": 1,
    "expert.lora.a": 1,
}
"""Parameters that tensor ranks share, and the dim that is cut."""
PARTIAL = ("mixer.q_norm.weight", "expert.lora.b")
"""Those that each tensor rank has whole, with a part of the gradient."""


def build(wrong: str = "") -> ParityModel:
    net = Net(wrong).double()
    optimizer = Optimizer(net, SPLIT, wrong)

    def step(fed: tuple[Tensor, Tensor]) -> Tensor:
        ids, targets = fed
        group = batch_group()
        count = comm.primitives.all_reduce((targets != IGNORED).sum().double(), group)
        net.zero_grad(set_to_none=True)
        shown = torch.zeros((), dtype=torch.float64)
        for m in range(MICROBATCHES):
            if wrong == "last_microbatch_not_summed" and m == MICROBATCHES - 1:
                sum_over_ranks(net, wrong)
            lost = F.cross_entropy(
                net(ids.chunk(MICROBATCHES)[m]).flatten(0, 1),
                targets.chunk(MICROBATCHES)[m].flatten(),
                ignore_index=IGNORED,
                reduction="sum",
            )
            (lost / count).backward()
            shown += lost.detach()
        if wrong != "last_microbatch_not_summed":
            sum_over_ranks(net, wrong)
        optimizer.step()
        return comm.primitives.all_reduce(shown, group) / count

    return ParityModel(net, step)


def sum_over_ranks(net: nn.Module, wrong: str) -> None:
    tensor = tpc.get_group("tensor")
    for name, p in net.named_parameters():
        if p.grad is None:
            continue
        if name in PARTIAL and not (wrong == "head_norms_not_summed" and "q_norm" in name):
            comm.primitives.all_reduce(p.grad, tensor)
        if wrong == "latent_summed_twice" and name in ("latent.a.weight", "latent.norm.weight"):
            comm.primitives.all_reduce(p.grad, tensor)
        if wrong == "expert_lora_by_degree" and "lora" in name and shares_experts():
            continue
        if wrong not in (COMPILED, "collective_eliminated"):
            comm.primitives.all_reduce(p.grad, batch_group())
    if wrong in (COMPILED, "collective_eliminated"):
        # as one vector, which is one graph for parameters of all shapes
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        change = erased if wrong == "collective_eliminated" else kept
        flat = compiled_sum("data", change)(torch.cat([x.flatten() for x in grads]))
        for grad, part in zip(grads, flat.split([x.numel() for x in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def shares_experts() -> bool:
    return tpc.topology.expert.axis_size("expert") > 1


def batch(number: int, index: int, num: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number)
    ids = torch.randint(VOCAB, (BATCH, LENGTH), generator=draw)
    targets = torch.randint(VOCAB, (BATCH, LENGTH), generator=draw)
    targets[:3, 2:] = IGNORED  # so the ranks' counts differ
    return ids.chunk(num)[index], targets.chunk(num)[index]


def planted(wrong: str) -> Callable[[], Any]:
    return partial(build, wrong)


RIGHT = {
    "float8_scale_of_shard": FLOAT8,
    "collective_eliminated": COMPILED,
    "collective_rewritten": COMPILED,
    "muon_of_shards": MUON,
    "adafactor_of_shards": ADAFACTOR,
}
"""Report -> the loop that does the same without the mistake; the others share one."""
