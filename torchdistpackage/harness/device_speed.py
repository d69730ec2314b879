"""How fast this rank's device multiplies, copies and starts operations, in about a second.

These are the numbers of a cluster profile from which `tdp plan --time --profile` predicts a step.
All ranks of a host measure at once, since they share its cores and its memory in a run too.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from torchdistpackage.harness.bench.profile import MeasuredDevice

_SIZES_ON_HOST = (32, 64, 128, 256, 512, 768)
_SIZES_ON_GPU = (256, 512, 1024, 2048, 4096, 8192)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BUDGET_S = 0.06
"""Seconds of each measurement, after one call that is not counted."""
_CHAIN = 50
"""Operations on one element, so that calls outweigh the clock."""


def device_speed(on_cuda: bool, num_ranks: int) -> MeasuredDevice:
    """Measure this rank's device. num_ranks: of this host."""
    device = torch.device("cuda" if on_cuda else "cpu")
    sizes = _SIZES_ON_GPU if on_cuda else _SIZES_ON_HOST
    matmuls = {dtype: _matmuls(sizes, kind, device) for dtype, kind in _DTYPES.items()}
    return MeasuredDevice(
        name=torch.cuda.get_device_name() if on_cuda else "cpu",
        num_ranks=num_ranks,
        matmuls=matmuls,
        bytes_per_s=_bytes_per_s(device),
        call_s=_call_s(device),
        memory_bytes=float(_memory_bytes(on_cuda)),
    )


def _matmuls(
    sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[tuple[float, float], ...]:
    times: list[tuple[float, float]] = []
    for size in sizes:
        times.append((2.0 * size**3, _matmul_s(size, dtype, device)))
        if times[-1][1] > _BUDGET_S:  # bfloat16 takes seconds on hosts without it
            break
    return tuple(times)


def _matmul_s(size: int, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return _median_s(lambda: torch.mm(a, b), device)


def _bytes_per_s(device: torch.device) -> float:
    """Of an addition, which reads two tensors and writes one."""
    count = 2**26 if device.type == "cuda" else 2**20
    a, b, result = (torch.ones(count, device=device) for _ in range(3))
    return 3 * 4 * count / _median_s(lambda: torch.add(a, b, out=result), device)


def _call_s(device: torch.device) -> float:
    leaf = torch.ones(1, device=device, requires_grad=True)

    def chain() -> None:
        value = leaf
        for _ in range(_CHAIN):
            value = value * 1.0
        value.sum().backward()

    return _median_s(chain, device) / (3 * _CHAIN)


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    times: list[float] = []
    call()
    _wait(device)
    end = time.perf_counter() + _BUDGET_S
    while time.perf_counter() < end or not times:
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _memory_bytes(on_cuda: bool) -> int:
    if on_cuda:
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
