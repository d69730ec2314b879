"""Ranks by the fork server on a GPU, after preloads of all kinds.

One rule: a rank either works or is refused before the fork, by name. What a user must never see
is CUDA's "initialization error" in a rank.
"""

import os
import time
from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.gpu import touches
from benchmarks.gpu.here import Here
from benchmarks.gpu.rows import Found
from torchdistpackage.comm import primitives
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.workers import run_local
from torchdistpackage.train.job import PRELOAD

SIZE = 512
TOUCHES = "benchmarks.gpu.touches"
MUST_REFUSE = ("tensor",)
"""A context of CUDA does not survive a fork."""


def measure(here: Here, found: Found) -> None:
    with found.case("after the launcher's preload"):
        seconds = _start([*PRELOAD])
        text = f"started, joined, summed and gone in {seconds:.1f} s"
        found.judge("after the launcher's preload", True, text, seconds=seconds)
    for way in touches.WAYS:
        with found.case(f"after a preload: {way}"):
            _touched(here, found, way)
    with found.case("workers of a DataLoader in a rank"):
        total = run_local(_load, (), num_procs=1, preload=["torch", "torch.utils.data"])[0]
        right = total == sum(range(64))
        found.judge("workers of a DataLoader in a rank", right, f"its batches add up to {total}")


def _start(preload: Sequence[str]) -> float:
    began = time.perf_counter()
    (total,) = run_local(_use, (), num_procs=1, preload=preload)
    assert total == SIZE**2, f"ones of {SIZE} x {SIZE} add up to {total}"
    return time.perf_counter() - began


def _touched(here: Here, found: Found, way: str) -> None:
    name = f"after a preload: {way}"
    must_refuse = way in MUST_REFUSE and not here.small
    with mock.patch.dict(os.environ, {touches.VARIABLE: way}):
        try:
            seconds = _start(["torch", "torch.distributed", TOUCHES])
        except LaunchError as error:
            harmless = way in touches.WAYS[:2]
            text = f"refused: {str(error).splitlines()[0][:160]}"
            found.judge(name, not harmless, text, refused=1)
        else:
            found.judge(name, not must_refuse, f"works, {seconds:.1f} s", refused=0)


def _use() -> float:
    """In the rank: a context, a kernel, a collective."""
    setup_distributed()
    device = primitives.device_of(torch.distributed.group.WORLD)
    x = primitives.all_reduce(
        torch.ones(SIZE, SIZE, device=device).sum(), torch.distributed.group.WORLD
    )
    leave()
    return float(x)


def _load() -> float:
    """Workers forked from a rank that uses the device already, with pinned batches."""
    on_gpu = torch.cuda.is_available()
    total: Tensor = torch.zeros((), device="cuda" if on_gpu else "cpu")
    numbers = TensorDataset(torch.arange(64.0))
    loader = DataLoader(
        numbers, batch_size=8, num_workers=2, pin_memory=on_gpu, multiprocessing_context="fork"
    )
    for (x,) in loader:
        total += x.to(total.device, non_blocking=True).sum()
    return float(total)
