"""`precision.fp8=linear`: a product beside that of the same rounded numbers, the loss beside that
of bf16, and a step of a wide GPT, eager and compiled.
"""

import gc
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.here import Here
from benchmarks.gpu.models import ONE_RANK, numbers, overrides, steady, trainer
from benchmarks.gpu.rows import Found
from benchmarks.turns import ratio
from torchdistpackage.parallel.tensor.float8 import CAPABILITY, rounded_rows, scaled_product
from torchdistpackage.train.compiled import use_cache, warm_up

PRODUCT, SMALL_PRODUCT = (2048, 4096, 8192), (64, 128, 32)
"""Rows, columns of the result, and what is added up."""
CURVE = [
    *("model.layers=2", "model.dim=32", "model.heads=2", "data.seq_len=32", "data.global_batch=8"),
    *("train.steps=200", "precision.dtype=bf16", *ONE_RANK),
]
STEPS, LAST, CLOSE = 200, 20, 0.02
ROUNDS, IN_ROUND = 5, 3
FP8 = "precision.fp8=linear"


def measure(here: Here, found: Found) -> None:
    if not here.small and torch.cuda.get_device_capability(here.device) < CAPABILITY:
        found.leave("float8", f"{torch.cuda.get_device_name(here.device)} has no such products")
        return
    here.join()
    with found.case("product"):
        _product(here, found)
    with found.case("loss of 200 steps"):
        _curve(here, found)
    gc.collect()
    with tempfile.TemporaryDirectory() as folder, found.case("step of a wide GPT"):
        use_cache(Path(folder) / "run", 0)
        _steps(here, found)
    here.leave()


def _product(here: Here, found: Found) -> None:
    """bf16 results of a product that adds up in the units of the device."""
    m, n, k = SMALL_PRODUCT if here.small else PRODUCT
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, k, generator=draw).to(here.device, torch.bfloat16) for rows in (m, n))
    (first, of_a), (second, of_b) = rounded_rows(a), rounded_rows(b)
    wanted = (first.float() * of_a) @ (second.float() * of_b).t()
    apart = float((scaled_product(a, b).float() - wanted).norm() / wanted.norm())
    found.judge("product", apart < 0.01, f"off by {apart:.1e} of its norm", apart=apart)


def _curve(here: Here, found: Found) -> None:
    losses = {side: _losses(here, extra) for side, extra in (("bf16", []), ("fp8", [FP8]))}
    plain, narrow = (sum(losses[side][-LAST:]) / LAST for side in ("bf16", "fp8"))
    apart = narrow / plain - 1
    found.judge(
        "loss of 200 steps",
        abs(apart) <= CLOSE and plain < 0.8 * losses["bf16"][0] and losses["bf16"] != losses["fp8"],
        f"from {losses['bf16'][0]:.3f} to {plain:.4f} in bf16, {narrow:.4f} in float8 "
        f"({apart:+.2%}; mean of the last {LAST})",
        bf16=plain,
        fp8=narrow,
        apart=apart,
    )


def _losses(here: Here, extra: list[str]) -> list[float]:
    train = trainer(here, [*CURVE, *extra])
    return [train.train_step(step, measure=False).wait().loss for step in range(1, STEPS + 1)]


def _steps(here: Here, found: Found) -> None:
    name = "tiny" if here.small else "wide"
    *_, seq_len, samples = numbers(name)
    backend = "aot_eager" if here.small else "inductor"
    compiled = ["train.compile=blocks", f"train.compile_backend={backend}"]
    plain = [*overrides(name), "precision.dtype=bf16"]
    sides = {
        "bf16": plain,
        "fp8": [*plain, FP8],
        "bf16, compiled": [*plain, *compiled],
        "fp8, compiled": [*plain, FP8, *compiled],
    }
    trained = {side: trainer(here, changes) for side, changes in sides.items()}
    for side, train in trained.items():
        if train.stage.compiled:
            torch._dynamo.reset()
            found.show(side, warm_up(train, 1))
    steps = {side: steady(train) for side, train in trained.items()}
    for step in steps.values():
        for _ in range(3):
            step()
    times = here.in_turns(steps, ROUNDS, IN_ROUND)
    for side, spread in times.items():
        of_plain, _ = ratio(spread, times["bf16"])
        of_alike, _ = ratio(spread, times["bf16, compiled" if "compiled" in side else "bf16"])
        rate = seq_len * samples / (spread["median"] / 1e3)
        found.show(
            f"{name}, {side}",
            f"{spread['median']:.1f} ms a step, {of_plain:.3f} of eager bf16, {of_alike:.3f} of "
            f"bf16 likewise; {rate:,.0f} tokens/s",
            ms=spread["median"],
            ratio=of_plain,
            ratio_alike=of_alike,
            tokens_per_s=rate,
        )
