"""What weights, gradients and optimizer state take on a rank, under each ZeRO stage. No torch.

One rule: stage 1 leaves to each of the ranks that share a parameter its part of the optimizer's
state, stage 2 of the gradient too, stage 3 of the weight too. Where a round has several
microbatches their gradients add up whole before they are summed, beside the part that stays. What
is whole for a moment, a few buckets on their way, does not count.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torchdistpackage.config.schema import PrecisionSection, RunConfig
from torchdistpackage.layout.derive import gradient_ranks, num_elements
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.views import Topology


@dataclass(frozen=True, slots=True)
class DTypeSizes:
    """A type of numbers: torch's name, and the bytes of one."""

    dtype: str
    num_bytes: int


_WIDE = {"float64": DTypeSizes("float64", 8)}
_FLOAT32, _BFLOAT16 = DTypeSizes("float32", 4), DTypeSizes("bfloat16", 2)


def weight_format(precision: PrecisionSection) -> DTypeSizes:
    """Of a weight: narrow only where that is asked for."""
    narrow = precision.dtype == "bf16" and precision.weights == "bf16"
    return _BFLOAT16 if narrow else _WIDE.get(precision.dtype, _FLOAT32)


def gradient_format(precision: PrecisionSection) -> DTypeSizes:
    """Of a sum of gradients, of AdamW's two means, and of the copy that narrow weights have."""
    return _WIDE.get(precision.dtype, _FLOAT32)


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one rank. optimizer: two means, and the wide copy of narrow weights."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    @property
    def state_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


def memory(
    config: RunConfig, topology: Topology, layouts: Iterable[Layout], rank: int
) -> MemoryEstimate:
    """Of a rank that holds these parameters."""
    weight, wide = weight_format(config.precision), gradient_format(config.precision)
    zero, has_copy = config.parallel.zero, weight != wide
    adds_up = zero < 2 or config.pipeline.microbatches > 1
    weights = gradients = optimizer = 0
    for layout in layouts:
        mesh = topology.view(layout.view)
        count = num_elements(layout, mesh, rank)
        part = -(-count // len(gradient_ranks(layout, mesh, rank)))
        # what the optimizer updates is a part apart then, so a wide one is no copy
        is_freed = zero == 3 and len(layout.stages) <= 1
        weights += (part * (not has_copy) if is_freed else count) * weight.num_bytes
        gradients += (count * adds_up + part * (zero >= 2)) * wide.num_bytes
        optimizer += (part if zero >= 1 else count) * wide.num_bytes * (2 + has_copy)
    return MemoryEstimate(weights, gradients, optimizer)
