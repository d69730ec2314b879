"""Statistics of tensors and differences of two checkpoints, one tensor at a time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.checkpoint.formats.source import TensorSource

_BLOCK = 1 << 20
"""Number of elements converted to float64 at a time."""


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of a tensor's finite elements. num_nonfinite: number of the other elements."""

    mean: float
    std: float
    smallest: float
    largest: float
    num_nonfinite: int


def stats_of(tensor: Tensor) -> TensorStats:
    """Return statistics of all elements; NaN if none is finite."""
    number = nonfinite = 0
    total = squares = 0.0
    smallest, largest = math.inf, -math.inf
    for (block,) in _blocks(tensor):
        finite = block[block.isfinite()]
        nonfinite += block.numel() - finite.numel()
        if finite.numel():
            number += finite.numel()
            # Python floats: the statistics of a tensor are text, and blocks may be on a device
            total += finite.sum().item()
            squares += finite.square().sum().item()
            smallest = min(smallest, finite.min().item())
            largest = max(largest, finite.max().item())
    if not number:
        return TensorStats(math.nan, math.nan, math.nan, math.nan, nonfinite)
    mean = total / number
    return TensorStats(
        mean, math.sqrt(max(squares / number - mean**2, 0.0)), smallest, largest, nonfinite
    )


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors of one shape.

    It is infinite if only one of two elements is NaN, or infinities differ.
    """
    largest = 0.0
    for a, b in _blocks(one, other):
        equal = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(equal, 0.0, (a - b).abs())
        difference[difference.isnan()] = math.inf
        largest = max(largest, difference.max().item()) if difference.numel() else largest
    return largest


def differences(one: TensorSource, other: TensorSource) -> Iterator[tuple[str, str, float]]:
    """Yield (name, kind of difference, largest difference) for each tensor that differs."""
    for name in one.tensors.keys() | other.tensors.keys():
        if name not in other.tensors:
            yield name, "only in the first", math.inf
        elif name not in one.tensors:
            yield name, "only in the second", math.inf
        elif one.tensors[name][1] != other.tensors[name][1]:
            shapes = " and ".join(str(x.tensors[name][1]) for x in (one, other))
            yield name, f"shapes {shapes}", math.inf
        else:
            largest = largest_difference(one.read(name), other.read(name))
            dtypes = [x.tensors[name][0] for x in (one, other)]
            if largest or dtypes[0] != dtypes[1]:
                fault = "" if dtypes[0] == dtypes[1] else f"types {' and '.join(dtypes)}"
                yield name, fault, largest


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield blocks of the flattened tensors in float64, so that sums lose nothing."""
    flat = [x.reshape(-1) for x in tensors]
    for start in range(0, flat[0].numel(), _BLOCK):
        yield tuple(x[start : start + _BLOCK].to(torch.float64) for x in flat)
