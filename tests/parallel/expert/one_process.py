"""A mixture of experts in one's own loop, on any layout, beside the reference in one process."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.layout.balances import BALANCES
from torchdistpackage.layout.moe import MoEShape
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.parallel import MoELayer, balance_experts
from torchdistpackage.parallel.expert.reference import reference_layer

S, B, DIM, HIDDEN = 6, 4, 8, 10
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
LOSS = {"balance": "aux_loss", "aux_loss": 0.3, "z_loss": 0.1}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"num_experts": 4, "top_k": 2, **LOSS},
    "global": {"num_experts": 4, "top_k": 1, "balance": "global_aux_loss", "aux_loss": 0.3},
    "uneven": {"num_experts": 5, "top_k": 3, "gated": False, "bias": True, **LOSS},
    "bias": {"num_experts": 6, "top_k": 2, "score": "sigmoid", "balance": "bias", "bias": True},
    "capacity": {"num_experts": 4, "top_k": 2, "capacity_factor": 0.7, **LOSS},
    "padded": {
        "num_experts": 5,
        "top_k": 2,
        "capacity_factor": 0.7,
        "pad_to_capacity": True,
        "bias": True,
        **LOSS,
    },
    "groups": {
        "num_experts": 8,
        "top_k": 2,
        "num_groups": 4,
        "top_groups": 2,
        "score": "sigmoid",
        "route_scale": 2.5,
        "normalize": True,
        "balance": "aux_loss",
        "aux_loss": 0.2,
    },
    "shared": {"num_experts": 4, "top_k": 2, "normalize": False, "shared_hidden": 6, **LOSS},
}
"""More than one thing in each."""
_BALANCES = {options.get("balance") for options in OPTIONS.values()}
OPTIONS |= {
    name: {"num_experts": 4, "top_k": 2, "balance": name, "aux_loss": 0.3}
    for name in BALANCES
    if name not in {*_BALANCES, "none"}
}


def drawn(seed: int, *shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=draw)


def whole_weights(shape: MoEShape, seed: int) -> dict[str, Tensor]:
    """By the names of a state dict of one process."""
    sizes = {"router.weight": (shape.num_experts, DIM)}
    for e in range(shape.num_experts):
        for name in ("gate", "up", "down") if shape.gated else ("up", "down"):
            matrix = (DIM, HIDDEN) if name == "down" else (HIDDEN, DIM)
            sizes[f"experts.{e}.{name}.weight"] = matrix
            if shape.bias:
                sizes[f"experts.{e}.{name}.bias"] = matrix[:1]
    if (hidden := shape.shared_hidden) is not None:
        sizes["shared.gate_up.weight"] = (2 * hidden, DIM)
        sizes["shared.down.weight"] = (DIM, hidden)
    return {name: 0.5 * drawn(seed + i, *size) for i, (name, size) in enumerate(sizes.items())}


def batch(step: int, skewed: bool) -> Tensor:
    """(S, B, DIM) of all ranks; skewed: tokens are so alike that most experts are idle."""
    x = drawn(1000 + step, S, B, DIM)
    return x * 0.05 + 2 * drawn(7, DIM) if skewed else x


def reference_loss(x: Tensor, weights: dict[str, Tensor], shape: MoEShape, bias: Tensor | None):
    """(loss of all tokens, y, aux loss)."""
    activation = F.silu if shape.gated else F.gelu
    y, aux = reference_layer(x, weights, shape, activation, bias)
    if shape.shared_hidden is not None:
        gate, up = F.linear(x, weights["shared.gate_up.weight"]).chunk(2, -1)
        y = y + F.linear(F.silu(gate) * up, weights["shared.down.weight"])
    return (y * target()).sum(-1).mean() + aux, y, aux


def target() -> Tensor:
    return drawn(3, S, 1, DIM)


def new_bias(bias: Tensor, x: Tensor, weights: dict[str, Tensor], shape: MoEShape) -> Tensor:
    chosen = ((x @ weights["router.weight"].T).sigmoid() + bias).topk(shape.top_k).indices
    counts = torch.bincount(chosen.flatten(), minlength=shape.num_experts).double()
    return bias + shape.bias_rate * (counts.mean() - counts).sign()


def train(
    axes: tuple[tuple[str, int], ...],
    expert: int,
    kind: str,
    how: str = "ddp",
    *,
    sequence_parallel: bool = False,
    skewed: bool = False,
    steps: int = 2,
) -> None:
    """Outputs, losses, clipped norms, weights and biases are those of one process."""
    tpc.setup_process_groups(list(axes), expert=expert)
    options = {**OPTIONS[kind], "hidden": HIDDEN}
    shape = MoEShape(**options)
    layer = MoELayer(DIM, dtype=torch.float64, sequence_parallel=sequence_parallel, **options)
    weights = whole_weights(shape, 11)
    layer.from_full(weights)
    plain = {name: w.clone().requires_grad_() for name, w in weights.items()}
    bias = torch.zeros(shape.num_experts).double() if shape.balance == "bias" else None
    for w in plain.values():
        w.grad = torch.zeros_like(w)
    own = torch.optim.Adam(plain.values(), 1e-2)
    trained = [p for p in layer.parameters() if p.requires_grad]
    adam: Any = torch.optim.Adam(trained, 1e-2)
    model: Any = layer
    if how == "ddp":
        model = NaiveDDP(layer)
    else:
        adam = ZeroOptimizer(adam, layer, stage=int(how))
    data, tensor = tpc.get_group("data"), tpc.get_group("tensor")
    rows = slice(None)
    if sequence_parallel:
        rows = slice(S // tensor.size() * tensor.rank(), S // tensor.size() * (tensor.rank() + 1))
    for step in range(steps):
        x = batch(step, skewed)
        mine = x.chunk(data.size(), 1)[data.rank()]
        y = model(mine[rows])
        local = (y * target()[rows]).sum(-1).sum() / (S * mine.shape[1])
        loss, whole_y, aux = reference_loss(x, plain, shape, bias)
        expected_y = whole_y.chunk(data.size(), 1)[data.rank()][rows]
        torch.testing.assert_close(y, expected_y, **CLOSE)
        (local + layer.aux_loss).backward()
        averaged = layer.aux_loss.detach().clone()
        torch.distributed.all_reduce(averaged, group=data)
        torch.testing.assert_close(averaged / data.size(), aux.detach(), **CLOSE)
        loss.backward()
        if how == "ddp":
            model.reduce_gradients()
        norm = clip_grad_norm_(trained if how == "ddp" else adam, 0.5)
        expected = torch.nn.utils.clip_grad_norm_(plain.values(), 0.5)
        torch.testing.assert_close(norm, expected, **CLOSE)
        adam.step()
        if bias is not None:
            bias = new_bias(bias, x, plain, shape)
        own.step()
        load = balance_experts(layer)["router"]
        assert sum(load.choices) == S * B * shape.top_k
        assert not skewed or load.dead
        adam.zero_grad()
        own.zero_grad(set_to_none=False)  # of an idle expert none would stop its momentum
    if how != "ddp":
        adam.finish()
    full = layer.to_full()
    for name, w in plain.items():
        torch.testing.assert_close(
            full[name], w.detach(), **CLOSE, msg=lambda m, n=name: f"{n}: {m}"
        )
    if bias is not None:
        torch.testing.assert_close(full["router.expert_bias"], bias, **CLOSE)
