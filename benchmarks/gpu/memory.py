"""What weights, gradients and optimizer state take, beside what `tdp plan` says they will.

Between a step and the next one nothing else is there but batches and a few numbers: what the
allocator was asked for then (`requested_bytes`) is compared. On the CPU, which counts nothing,
storages are counted.
"""

import gc
import os

import torch

from benchmarks.gpu.here import Here
from benchmarks.gpu.models import overrides, plan_of, sizes, trainer
from benchmarks.gpu.rows import Found
from tests.ddp.allocated import Meter
from torchdistpackage.plan.run_plan import stage_loads
from torchdistpackage.train.data_build import build_data

MIB = 2**20
CLOSE, SPARE_BYTES = 0.02, 64 * MIB
"""Of the plan, and what batches, and buckets that are whole for a moment, may take beside it."""
STEPS = 4


def measure(here: Here, found: Found) -> None:
    if not here.small:
        expandable = "True" in os.environ.get("PYTORCH_ALLOC_CONF", "")
        found.show("expandable segments", "on" if expandable else "off")
    here.join()
    for stage in range(4):
        with found.case(f"ZeRO {stage}" if stage else "plain"):
            _stage(here, found, stage)
    here.leave()


def _stage(here: Here, found: Found, stage: int) -> None:
    changes = [*overrides(sizes(here)[0]), "precision.dtype=bf16", f"parallel.zero={stage}"]
    plan, meter = plan_of(changes), Meter()
    # before anything is counted: the text is mapped from its files, and no memory of a step
    data = build_data(plan)
    gc.collect()  # the case before this one: its trainer is in cycles, and would be counted as ours
    before = _held(here, meter)
    if not here.small:
        torch.cuda.reset_peak_memory_stats()

    def train():
        trained = trainer(here, changes, data)
        for step in range(1, STEPS + 1):
            trained.train_step(step, measure=False)
        return trained

    trained = meter.run(train) if here.small else train()
    gc.collect()
    here.sync()
    held = _held(here, meter) - before
    (load,) = stage_loads(plan)
    planned = load.memory.state_bytes
    name = f"ZeRO {stage}" if stage else "plain"
    numbers: dict[str, float] = {"held_bytes": held, "planned_bytes": planned}
    text = f"{held / MIB:,.1f} MiB where {planned / MIB:,.1f} were planned ({held / planned:.3f})"
    if not here.small:
        stats = torch.cuda.memory_stats()
        peak, reserved = (stats[f"{x}.all.peak"] for x in ("requested_bytes", "reserved_bytes"))
        step = [STEPS]

        def one() -> None:
            step[0] += 1
            trained.train_step(step[0], measure=False)

        took_s, retries = here.median_s(one), stats["num_alloc_retries"]
        numbers |= {"peak_bytes": peak, "reserved_bytes": reserved, "step_s": took_s}
        text += (
            f"; at the worst {peak / MIB:,.0f}, reserved {reserved / MIB:,.0f}, {retries} retries, "
            f"{1e3 * took_s:.1f} ms a step"
        )
    found.judge_time(name, abs(held - planned) <= CLOSE * planned + SPARE_BYTES, text, **numbers)
    trained.reducer.remove()


def _held(here: Here, meter: Meter) -> int:
    if here.small:
        return meter.now
    return torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
