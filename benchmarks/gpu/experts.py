"""Experts as one grouped product in bf16: right beside float64, fast beside loop and transformers.

Sizes are those of Qwen3-30B-A3B's layers (128 experts, top 8) and of Mixtral-8x7B's (8, top 2).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.experts import step, transformers_block
from benchmarks.gpu.here import Here
from benchmarks.gpu.rows import Found
from benchmarks.turns import ratio
from torchdistpackage.parallel import MoELayer
from torchdistpackage.parallel.expert import products


class Sizes(NamedTuple):
    dim: int
    hidden: int
    num_experts: int
    top_k: int
    tokens: int


SIZES = {
    "128 experts, top 8": Sizes(2048, 768, 128, 8, 8192),
    "8 experts, top 2": Sizes(4096, 14336, 8, 2, 4096),
}
SMALL = {"8 experts, top 2": Sizes(32, 48, 8, 2, 96)}
WAYS = ("grouped_mm", "batched_mm", "eager")
ROUNDS = 7


def measure(here: Here, found: Found) -> None:
    here.join()
    for dtype in (torch.bfloat16, torch.float32):
        for counts in ((40, 0, 8, 300), (0, 0, 0, 16), (7, 1, 130, 2)):
            name = f"{str(dtype).removeprefix('torch.')}, rows {', '.join(map(str, counts))}"
            with found.case(name):
                _product(here, found, name, dtype, counts)
    for name, sizes in (SMALL if here.small else SIZES).items():
        with found.case(name):
            _layer(here, found, name, sizes)
    here.leave()


def _product(
    here: Here, found: Found, name: str, dtype: torch.dtype, counts: tuple[int, ...]
) -> None:
    """Output and gradients of one grouped product beside those of float64."""
    torch.manual_seed(0)
    numbers = torch.tensor(counts, device=here.device)
    x = torch.randn(sum(counts), 64, device=here.device)
    weight = torch.randn(len(counts), 128, 64, device=here.device)
    grad = torch.randn(sum(counts), 128, device=here.device)

    def of(dtype: torch.dtype) -> list[Tensor]:
        inputs = [t.to(dtype).requires_grad_() for t in (x, weight)]
        y = products.grouped_linear(*inputs, numbers)
        return [y.detach(), *torch.autograd.grad(y, inputs, grad.to(dtype))]

    exact, got = of(torch.float64), of(dtype)
    off = max(
        float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-9))
        for a, b in zip(got, exact, strict=True)
    )
    limit = 2e-2 if dtype is torch.bfloat16 else 2e-3  # of TF32 products, if they are allowed
    idle = [e for e, n in enumerate(counts) if n == 0]
    is_zero = not got[2][idle].any()
    way = "grouped" if products._has_grouped_mm(x.to(dtype), weight.to(dtype)) else "loop"
    text = f"{way}: {off:.1e} from float64; experts without a row have zeros: {is_zero}"
    found.judge(name, off <= limit and is_zero, text, off=off)


def _layer(here: Here, found: Found, name: str, sizes: Sizes) -> None:
    *shape, num = sizes
    dtype = torch.float32 if here.small else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(here.device):
        layer = MoELayer(*shape, gated=True, balance="none", check_nan=False, dtype=dtype)
        x, grad = (torch.randn(num // 4, 4, layer.dim, dtype=dtype) for _ in range(2))
    sides: dict[str, Callable[[], object]] = {"layer": lambda: step(layer, x, grad)}
    expected = step(layer, x, grad)
    with torch.no_grad():
        routing, tokens = layer.router(x), x.flatten(0, 1)
    sides["loop"] = lambda: _looped(layer, x, grad)
    _near(found, f"{name}, loop", _looped(layer, x, grad), expected)
    if not here.small:
        with found.case(f"{name}, no wait"):
            _no_wait(found, name, sides["layer"])
    # products of each token with matrices of its own take as much memory as these
    most = num * layer.shape.top_k * 3 * layer.dim * layer.shape.hidden * x.element_size()
    for way in WAYS:
        if way == "batched_mm" and most > 4e9:
            continue
        with found.case(f"{name}, transformers, {way}"):
            block = transformers_block(layer, way)
            with torch.no_grad():  # by the layer's choices, as bfloat16 scores make others
                y = block.experts(tokens, routing.experts, routing.weights.to(dtype))
            _near(found, f"{name}, transformers, {way}", [y.view_as(x)], expected[:1])
            sides[f"transformers, {way}"] = lambda block=block: step(block, x, grad)
    for side in sides.values():
        side()
    times = here.in_turns(sides, ROUNDS, 3)
    flops = 3 * 2 * num * layer.shape.top_k * 3 * layer.dim * layer.shape.hidden
    for side, spread in times.items():
        value, _ = ratio(times["layer"], spread)
        text = f"{spread['median']:.2f} ms, {flops / spread['median'] / 1e9:.0f} TFLOP/s"
        found.show(f"{name}, {side}", f"{text}; the layer takes {value:.3f} of it", ratio=value)
    best = min((s for s in times if s.startswith("transf")), key=lambda s: times[s]["median"])
    for text, peer, bar in ((f"layer / {best}", best, 1.00), ("layer / loop", "loop", 0.80)):
        value, _ = ratio(times["layer"], times[peer])
        found.judge_time(
            f"{name}, {text}", value <= bar, f"{value:.3f}, bar {bar:.2f}", ratio=value
        )


def _looped(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The layer with one product for each expert in place of a grouped one."""
    grouped, products._has_grouped_mm = products._has_grouped_mm, lambda x, weight: False
    try:
        return step(layer, x, grad)
    finally:
        products._has_grouped_mm = grouped


def _near(found: Found, name: str, got: list[Tensor], expected: list[Tensor]) -> None:
    off = max(
        float((a.float() - b.float()).norm() / b.float().norm())
        for a, b in zip(got, expected, strict=True)
    )
    found.judge(f"{name}, the same", off <= 2e-2, f"{off:.1e} of the norm apart", off=off)


def _no_wait(found: Found, name: str, side: Callable[[], object]) -> None:
    """On one rank sizes are known without the counts; torch raises where its code waits."""
    side()
    torch.cuda.set_sync_debug_mode("error")
    try:
        side()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found.judge(f"{name}, no wait", True, "the host waits for nothing in forward and backward")
