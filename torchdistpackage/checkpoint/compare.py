"""Statistics of tensors and differences of two checkpoints, one tensor at a time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.checkpoint.formats.source import TensorSource

_BLOCK = 1 << 20
"""Elements that are widened to float64 at a time."""


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Of the finite elements of a tensor. num_nonfinite: of the others."""

    mean: float
    std: float
    smallest: float
    largest: float
    num_nonfinite: int


def stats_of(tensor: Tensor) -> TensorStats:
    """Statistics of all elements; NaN of none."""
    number, total, squares = 0, 0.0, 0.0
    smallest, largest, nonfinite = math.inf, -math.inf, 0
    for (block,) in _blocks(tensor):
        finite = block[block.isfinite()]
        nonfinite += block.numel() - finite.numel()
        if finite.numel():
            number += finite.numel()
            total += finite.sum().item()
            squares += finite.square().sum().item()
            smallest, largest = (
                min(smallest, finite.min().item()),
                max(largest, finite.max().item()),
            )
    if not number:
        return TensorStats(math.nan, math.nan, math.nan, math.nan, nonfinite)
    mean = total / number
    return TensorStats(
        mean, math.sqrt(max(squares / number - mean**2, 0.0)), smallest, largest, nonfinite
    )


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Of two tensors of one shape; infinite where only one is NaN, or they differ in infinity."""
    largest = 0.0
    for a, b in _blocks(one, other):
        equal = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(equal, 0.0, (a - b).abs())
        difference[difference.isnan()] = math.inf
        largest = max(largest, difference.max().item()) if difference.numel() else largest
    return largest


def differences(one: TensorSource, other: TensorSource) -> Iterator[tuple[str, str, float]]:
    """(name, what, how large) for each tensor that is not equal in two checkpoints."""
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
                what = "" if dtypes[0] == dtypes[1] else f"types {' and '.join(dtypes)}"
                yield name, what, largest


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    flat = [x.reshape(-1) for x in tensors]
    for start in range(0, flat[0].numel(), _BLOCK):
        yield tuple(x[start : start + _BLOCK].to(torch.float64) for x in flat)
