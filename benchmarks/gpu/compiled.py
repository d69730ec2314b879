"""`train.compile=blocks` beside eager steps: time, kernels, graphs, seconds to compile, and again
with what the first start kept.
"""

import tempfile
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.here import Here
from benchmarks.gpu.models import numbers, overrides, sizes, steady, trainer
from benchmarks.gpu.rows import Found
from benchmarks.turns import ratio
from torchdistpackage.train.compiled import use_cache, warm_up

ROUNDS, STEPS = 5, 4


def measure(here: Here, found: Found) -> None:
    here.join()
    with tempfile.TemporaryDirectory() as folder:
        use_cache(Path(folder) / "run", 0)
        for name in sizes(here):
            with found.case(name):
                _steps(here, found, name)
    here.leave()


def _steps(here: Here, found: Found, name: str) -> None:
    *_, seq_len, samples = numbers(name)
    plain = [*overrides(name), "precision.dtype=bf16"]
    backend = "aot_eager" if here.small else "inductor"
    compiled = [*plain, "train.compile=blocks", f"train.compile_backend={backend}"]
    first, second = trainer(here, plain), trainer(here, compiled)
    torch._dynamo.reset()
    found.show(f"{name}, first start", warm_up(second, 1))
    breaks = sum(counters["graph_break"].values())
    found.judge(f"{name}, graph breaks", breaks == 0, str(breaks), graph_breaks=breaks)
    torch._dynamo.reset()
    found.show(f"{name}, second start", warm_up(second, 1))
    steps = {"eager": steady(first), "compiled": steady(second)}
    for step in steps.values():
        for _ in range(3):
            step()
    times = here.in_turns(steps, ROUNDS, STEPS)
    for side, spread in times.items():
        value, _ = ratio(spread, times["eager"])
        kernels = _kernels(here, steps[side])
        rate = seq_len * samples / (spread["median"] / 1e3)
        found.show(
            f"{name}, {side}",
            f"{spread['median']:.1f} ms a step, {value:.3f} of eager, {rate:,.0f} tokens/s, "
            f"{kernels} kernels; the host {1e3 * here.issue_s(steps[side]):.1f} ms",
            ms=spread["median"],
            ratio=value,
            tokens_per_s=rate,
            kernels=kernels,
        )
    value, _ = ratio(times["compiled"], times["eager"])
    found.judge_time(f"{name}, compiled is no slower", value <= 1.0, f"{value:.3f}", ratio=value)


def _kernels(here: Here, step) -> int:
    """That a step launches; on the CPU, operators."""
    kind = ProfilerActivity.CPU if here.small else ProfilerActivity.CUDA
    with profile(activities=[kind]) as found:
        step()
        if not here.small:
            torch.cuda.synchronize()
    return sum(event.count for event in found.key_averages())
