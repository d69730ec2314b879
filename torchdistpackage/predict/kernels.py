"""Seconds of one kernel on a device: matmuls by shape and dtype, attention, element-wise work.

A matmul is cut into tiles that the cores compute in waves; the last wave is as long as a full one,
and each wave starts and ends a pipeline of its own. What it reads and writes may take longer, and
then it is that. Element-wise kernels take the time of their bytes. Every kernel costs a launch.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchdistpackage.predict.devices import Accelerator
from torchdistpackage.predict.workload import AttentionKernel

LAUNCH_S = 2e-6
"""Seconds between the end of a kernel and the start of the next in one stream."""
_TILE_S = 1.5e-6
"""Seconds to fill and to drain the pipeline of a tile."""
_TILES = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.6))
"""Rows, columns, and the share of the rate of the largest tile that one of this size reaches, as it
reads more for each of its results."""
CAST_BYTES = 4
"""Bytes read and written to bring a bfloat16 number to float8, where a kernel before it has looked
for the largest value: about half of the casts read for that once more."""
TRANSPOSE_BYTES = 2
"""The same for the second copy, turned round for the matmul of the gradient."""

ATTENTION_ROWS = 256
"""Rows of a tile of attention: of two groups of warps on Hopper and Blackwell."""


@dataclass(frozen=True, slots=True)
class Matmul:
    """Rows m and columns n of a result whose sums have k terms, `count` times in one kernel."""

    m: float
    n: float
    k: float
    count: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def elements(self) -> float:
        """Numbers read and written."""
        return self.count * (self.m * self.k + self.k * self.n + self.m * self.n)

    @property
    def of_input(self) -> "Matmul":
        """The matmul of the input's gradient."""
        return Matmul(self.m, self.k, self.n, self.count)

    @property
    def of_weight(self) -> "Matmul":
        """The matmul of the weight's gradient."""
        return Matmul(self.k, self.n, self.m, self.count)


def matmul_seconds(
    device: Accelerator, matmul: Matmul, dtype: str, more_bytes: float = 0.0
) -> float:
    """Return the seconds of a matmul without its launch.

    dtype: "float8" is read as one byte. more_bytes: what it reads and writes besides.
    """
    if matmul.flops <= 0:
        return 0.0
    if times := device.matmul_times.get(priced_as(device, dtype)):
        flops_of_one = matmul.flops / matmul.count
        return matmul.count * _between(times, flops_of_one) + memory_seconds(device, more_bytes)
    core = device.peak(dtype) * device.clock * device.fit.of_matmul(dtype) / device.cores
    seconds = math.inf
    for rows, columns, share in _TILES:
        tiles = math.ceil(matmul.m / rows) * math.ceil(matmul.n / columns) * matmul.count
        tile_s = 2.0 * rows * columns * matmul.k / (core * share) + _TILE_S
        seconds = min(seconds, math.ceil(tiles / device.cores) * tile_s)
    item = {"float8": 1, "bfloat16": 2, "float64": 8}.get(dtype, 4)
    return max(seconds, memory_seconds(device, matmul.elements * item + more_bytes))


def priced_as(device: Accelerator, dtype: str) -> str:
    """Return the dtype whose measured matmuls stand for those of `dtype`: itself where it was
    measured, or where nothing was."""
    times = device.matmul_times
    if not times or dtype in times:
        return dtype
    others = ("bfloat16", "float32") if dtype == "float8" else ("float32", "bfloat16")
    return next(each for each in others if each in times)


def _between(times: Sequence[tuple[float, float]], flops: float) -> float:
    """Return the seconds of so many operations between measured ones, along straight lines of their
    logarithms; the rate of the last beyond it, the time of the first before it."""
    if flops <= times[0][0]:
        return times[0][1]
    for (low, low_s), (high, high_s) in itertools.pairwise(times):
        if flops <= high:
            share = math.log(flops / low) / math.log(high / low)
            return low_s * (high_s / low_s) ** share
    return times[-1][1] * flops / times[-1][0]


def memory_seconds(device: Accelerator, num_bytes: float) -> float:
    """Return the seconds that reading and writing so many bytes takes."""
    return num_bytes / (device.memory_bytes_per_s * device.fit.memory)


def attention_seconds(
    device: Accelerator,
    kernel: AttentionKernel,
    flops: float,
    seq_len: float,
    backward: bool,
    head_dim: int = 128,
    tiles: float = math.inf,
) -> float:
    """Return the seconds of flash attention. flops: of the part under the causal mask. tiles: of
    `ATTENTION_ROWS` rows of a head, each computed by one core."""
    if device.attention_s is not None:
        return flops * device.attention_s[backward]
    if device.matmul_times:  # as plain matmuls of that rate, which is what was measured
        times = device.matmul_times[priced_as(device, "bfloat16")]
        return flops * times[-1][1] / times[-1][0]
    shares = device.flash2 if kernel == "flash2" else device.flash3
    # narrow heads have as many exponentials for fewer operations
    share = shares[backward] * seq_len / (seq_len + device.half_length)
    share *= min(head_dim + 128, 256) / 256
    waves = tiles / device.cores
    # forward the last tile of a head has the whole sequence, twice the mean, and no core helps it
    if backward:
        longest = max(1 / waves, 1.0) if device.half_length == 0 else 1.0
    else:
        longest = 1 + 2 / waves if device.half_length == 0 else max(2 / waves, 1.0)
    return longest * flops / (device.peak("bfloat16") * device.clock * share)


def launches(count: float) -> float:
    """Return the seconds that launching `count` kernels takes."""
    return count * LAUNCH_S
