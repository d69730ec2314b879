"""A step of `tdp train` with a GPT in bf16, beside a bare loop and the ceiling of a matrix product.

The bare loop trains the same model on the same tokens without anything of the package around
it. MFU divides by the ceiling that was measured here, not by a data sheet.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.here import Here
from benchmarks.gpu.models import (
    adamw,
    batch,
    gpt,
    loss_of,
    numbers,
    overrides,
    sizes,
    steady,
    trainer,
)
from benchmarks.gpu.rows import Found
from benchmarks.turns import ratio
from torchdistpackage.models.gpt_numbers import flops_per_token

PRODUCT, SMALL_PRODUCT = 8192, 256
ROUNDS, STEPS = 7, 4
FUSED = ("flash", "cudnn", "efficient", "overrideable")
"""Attention that never holds the scores of all pairs."""


def measure(here: Here, found: Found) -> None:
    here.join()
    ceiling = ceiling_of(here)
    found.show("ceiling: a bf16 product", f"{ceiling / 1e12:.2f} TFLOP/s", flops_per_s=ceiling)
    for name in sizes(here):
        with found.case(name):
            _steps(here, found, name, ceiling)
    with found.case("attention under bf16"):
        _attention(here, found)
    here.leave()


def ceiling_of(here: Here) -> float:
    """Operations a second of a square product of bf16."""
    n = SMALL_PRODUCT if here.small else PRODUCT
    a, b = (torch.randn(n, n, device=here.device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / here.median_s(lambda: a @ b, rounds=5, times=20)


def _steps(here: Here, found: Found, name: str, ceiling: float) -> None:
    *_, seq_len, samples = numbers(name)
    train = trainer(here, [*overrides(name), "precision.dtype=bf16"])
    own, data = gpt(here, name), batch(here, name)
    optimizer = adamw(own.parameters())

    def bare() -> None:
        optimizer.zero_grad()
        loss_of(here, own, own, data).backward()
        torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)
        optimizer.step()

    steps = {"a bare loop": bare, "tdp train": steady(train)}
    for step in steps.values():
        for _ in range(5):
            step()
    times = here.in_turns(steps, ROUNDS, STEPS)
    work = flops_per_token(own.shape) * seq_len * samples
    for side, spread in times.items():
        step_s = spread["median"] / 1e3
        value, _ = ratio(spread, times["a bare loop"])
        mfu = work / step_s / ceiling
        found.show(
            f"{name}, {side}",
            f"{spread['median']:.1f} ms a step, {value:.3f} of the bare loop, "
            f"{seq_len * samples / step_s:,.0f} tokens/s, {mfu:.1%} of the ceiling; the host "
            f"{1e3 * here.issue_s(steps[side]):.1f} ms",
            ms=spread["median"],
            ratio=value,
            mfu=mfu,
            tokens_per_s=seq_len * samples / step_s,
        )


class _Names(TorchDispatchMode):
    """Operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def _attention(here: Here, found: Found) -> None:
    """Which back end the tensors of models/gpt are given to."""
    name = sizes(here)[0]
    own, data = gpt(here, name), batch(here, name)
    with _Names() as names:
        loss: Tensor = loss_of(here, own, own, data)
        loss.backward()
    ran = sorted(x.partition("::")[2] for x in names.seen if "scaled_dot_product" in x)
    fused = any(word in name for word in FUSED for name in ran)
    found.judge_time("attention under bf16", fused, ", ".join(ran) or "none by a name of its own")
