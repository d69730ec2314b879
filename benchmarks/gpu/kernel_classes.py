"""Classes of a step's kernels and the time of each, from the names that a profiler gives. No torch.

Kernels of several streams may run at once: a class has the sum of its kernels' times, and idle is
the time from the first kernel's start to the last one's end in which none runs.
"""

import re
from collections.abc import Iterable, Sequence

CLASSES: dict[str, re.Pattern[str]] = {
    "communication": re.compile(r"nccl|c10d|gloo", re.I),
    "attention": re.compile(r"flash|fmha|attention|sdpa|mha_", re.I),
    "optimizer": re.compile(r"multi_tensor|adam|foreach|lamb|lion", re.I),
    "matmul": re.compile(
        r"triton_tem|gemm|cublas|nvjet|cutlass|wgmma|xmma|splitk|::(add|b|bad)?b?mm\b|matmul|::linear",
        re.I,
    ),
    "copy": re.compile(r"^(?!triton_).*(memcpy|memset|copy|CatArray|::cat\b|::clone)", re.I),
}
"""By class the names of its kernels; the first that matches counts. Inductor names a kernel by all
that it fused, casts too."""
REST, IDLE = "norm/elementwise", "idle"

Kernel = tuple[str, float, float]
"""Name, start and end."""


def class_of(name: str) -> str:
    """Return the class of a kernel; kernels of no other class are norms or elementwise."""
    return next((each for each, names in CLASSES.items() if names.search(name)), REST)


def times_by_class(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Return the time of each class, the longest first, and of idle, in the unit of the kernels."""
    kernels = sorted(kernels, key=lambda kernel: kernel[1])
    times: dict[str, float] = {}
    for name, start, end in kernels:
        of = class_of(name)
        times[of] = times.get(of, 0.0) + end - start
    ordered = dict(sorted(times.items(), key=lambda item: -item[1]))
    return {**ordered, IDLE: _idle(kernels)}


def _idle(kernels: Sequence[Kernel]) -> float:
    """Return the time between kernels in order of their starts."""
    if not kernels:
        return 0.0
    idle, busy_until = 0.0, kernels[0][1]
    for _, start, end in kernels:
        idle += max(start - busy_until, 0.0)
        busy_until = max(busy_until, end)
    return idle
