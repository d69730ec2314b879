"""What Python allocates for a microbatch in the steady state of a step, as tracemalloc counts it.

From one forward of a stage to its next one a schedule handles one microbatch. What counts is the
most bytes held at once in that time above those held when it began, so what is freed in it counts
too; the first and the last quarter of the step are left out.
"""

import gc
import tracemalloc
from collections.abc import Callable
from statistics import fmean

from torch import nn

WARM_UP_CALLS = 512
"""The record keeps so many calls, and grows until then."""


def bytes_per_microbatch(step: Callable[[], object], stage: nn.Module, m: int) -> float:
    """Mean over the steady state of a step of `m` microbatches, `stage` being one of this rank."""
    taken: list[int] = []
    held_before = [0]

    def at_forward(*_: object) -> None:
        now, peak = tracemalloc.get_traced_memory()
        taken.append(peak - held_before[0])
        tracemalloc.reset_peak()
        held_before[0] = now

    tracemalloc.start()  # first, so that what is replaced in the step counts as freed
    for _ in range(2 + WARM_UP_CALLS // (2 * m)):
        step()
    hook = stage.register_forward_pre_hook(at_forward)
    gc.collect()
    gc.disable()
    step()
    tracemalloc.stop()
    gc.enable()
    hook.remove()
    return fmean(taken[m // 4 : -(m // 4)])
