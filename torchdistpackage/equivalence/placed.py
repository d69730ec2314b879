"""Comparison of tensors with a known place in the full one: weights, gradients, optimizer states.

A layout says where a rank's elements belong, so nothing is looked for, and a right shard in the
wrong place is a difference.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchdistpackage.layout.derive import Box

Placed = dict[str, list[tuple[Box, Tensor]]]
"""Name of a global tensor -> the boxes of it that a rank holds, with the elements in them."""

STATE = "#"
"""The text that separates a parameter's name from the key of a state that an optimizer keeps for
it.
"""


def full_tensors(record: Placed) -> dict[str, Tensor]:
    """Return the tensors of one process, each as one box with all of it."""
    return {name: boxes[0][1] for name, boxes in record.items() if len(boxes) == 1}


def gap(box: Box, tensor: Tensor, full: Tensor) -> float | None:
    """Return the largest difference from the full tensor's elements in the box, over the largest
    number of the full one; None: the shapes do not fit.
    """
    expected = full[box] if box else full
    if expected.shape != tensor.shape:
        return None
    if not tensor.numel():
        return 0.0
    scale = max(float(full.abs().max()), 1e-30)
    # in float64, or the subtraction of two bf16 tensors would round the difference itself
    apart = float((tensor.double() - expected.double()).abs().max())
    return float("inf") if apart != apart else apart / scale  # NaN


def worst_gap(
    name: str, full: Tensor, ranks: Sequence[Placed], tolerance: float
) -> tuple[float | None, int] | None:
    """Return the largest difference of what the ranks hold of a tensor, and the rank; None: none
    is above the tolerance, and together the ranks hold all of it.
    """
    worst: tuple[float | None, int] | None = None
    seen = torch.zeros(full.shape, dtype=torch.bool)
    for rank, record in enumerate(ranks):
        for box, tensor in record.get(name, ()):
            size = gap(box, tensor, full)
            if size is None:
                return None, rank
            seen[box if box else ...] = True
            if size > tolerance and (worst is None or size > (worst[0] or 0.0)):
                worst = size, rank
    if worst is None and not bool(seen.all()):
        return None, next((i for i, x in enumerate(ranks) if name in x), 0)
    return worst


def copies_differ(name: str, ranks: Sequence[Placed]) -> bool:
    """Return True if two ranks hold the same box of a tensor, with other values."""
    first: dict[object, Tensor] = {}
    for record in ranks:
        for box, tensor in record.get(name, ()):
            other = first.setdefault(str(box), tensor)
            if other.shape == tensor.shape and not torch.allclose(
                tensor, other, rtol=1e-9, atol=1e-12
            ):
                return True
    return False


def assembled(full: Mapping[str, Tensor], ranks: Sequence[Placed]) -> dict[str, Tensor]:
    """Return the full tensors that the ranks' boxes make, where two hold one element the one that
    is further from the right one; what no rank holds is zero.
    """
    tensors: dict[str, Tensor] = {}
    for name, right in full.items():
        boxes = [each for record in ranks for each in record.get(name, ())]
        if not boxes:
            continue
        full_tensor, seen = torch.zeros_like(right), torch.zeros(right.shape, dtype=torch.bool)
        for box, tensor in boxes:
            at = box if box else ...
            expected = right[at]
            if expected.shape != tensor.shape:
                continue
            further = (tensor - expected).abs() >= (full_tensor[at] - expected).abs()
            full_tensor[at] = torch.where(
                further | ~seen[at], tensor.to(full_tensor.dtype), full_tensor[at]
            )
            seen[at] = True
        tensors[name] = full_tensor
    return tensors
