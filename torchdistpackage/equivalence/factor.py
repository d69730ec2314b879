"""The factor by which ranks' numbers differ from the right ones.

A factor says more than a size: twice the right gradient was summed instead of averaged, a gradient
of zeros was never sent.
"""

import itertools
import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from torchdistpackage.equivalence.match import TOLERANCE, difference

_MOST = 16
"""Largest whole factor that is tried where a rank's tensor is a shard of unknown place."""


def ratio_text(ratio: float, axes: Mapping[str, int]) -> str:
    """Return a ratio as `x 2`, `/ 4` or `x 1.414`; empty if it says nothing."""
    if not math.isfinite(ratio) or abs(ratio - 1) <= TOLERANCE:
        return ""
    if ratio == 0:
        return "x 0"
    for factor in _candidates(axes):
        if abs(ratio / factor - 1) < 1e-6:
            return _text(factor)
    return f"x {ratio:.4g}"


def factor_of(
    by_rank: Mapping[int, Tensor],
    full: Tensor,
    axes: Mapping[str, int],
    tolerance: float = TOLERANCE,
) -> str:
    """Return the relation of the ranks' tensors to the full one, each being any shard of it.

    The text is `x 2`, `/ 2`, also with the ranks of which alone it holds, or `missing on rank 1`.
    It is empty if some rank's tensor is wrong in another way.
    """
    if not full.is_floating_point() or not by_rank or not bool(full.any()):
        return ""
    factors: dict[int, float] = {}
    for rank, tensor in by_rank.items():
        factor = _factor(tensor, full, axes, tolerance)
        if factor is None:
            return ""
        factors[rank] = factor
    wrong = {rank: x for rank, x in factors.items() if x != 1.0}
    if len({*wrong.values()}) != 1:
        return ""
    factor = next(iter(wrong.values()))
    ranks = ", ".join(map(str, wrong))
    if factor == 0.0:
        return f"missing on rank {ranks}"
    return _text(factor) if len(wrong) == len(factors) else f"{_text(factor)} on rank {ranks}"


def _factor(
    tensor: Tensor, full: Tensor, axes: Mapping[str, int], tolerance: float
) -> float | None:
    """Return the factor that turns some shard of the full tensor into this one; None: no factor
    does.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    if not bool(tensor.any()):
        gap = difference(tensor, full)
        return 1.0 if gap is not None and gap <= tolerance else 0.0
    if tensor.shape == full.shape:
        # in float64, so that the factor is exact enough to recognise a degree
        a, b = tensor.double().flatten(), full.double().flatten()
        factor = float(a @ b / (b @ b))
        residual = float((a - factor * b).abs().max()) / max(float(a.abs().max()), 1e-30)
        if factor and residual <= tolerance:
            rounded = next((x for x in _candidates(axes) if abs(factor / x - 1) < 1e-6), factor)
            return 1.0 if abs(factor - 1) <= tolerance else rounded
    for factor in (1.0, *_candidates(axes)):
        # in float64, so that the division adds no rounding error of its own
        gap = difference(tensor.double() / factor, full)
        if gap is not None and gap <= tolerance:
            return factor
    return None


def _candidates(axes: Mapping[str, int]) -> Iterator[float]:
    """Yield the factors that mistakes usually make: sizes of axes, products, and small numbers."""
    sizes = [size for size in axes.values() if size > 1]
    products = {
        math.prod(chosen)
        for number in range(1, len(sizes) + 1)
        for chosen in itertools.combinations(sizes, number)
    }
    for size in dict.fromkeys([*sorted(products), *range(2, _MOST + 1)]):
        yield float(size)
        yield 1.0 / size


def _text(factor: float) -> str:
    if factor >= 1 or factor < 0:
        return f"x {factor:.4g}"
    inverse = 1 / factor
    return f"/ {inverse:.4g}" if abs(inverse - round(inverse)) < 1e-6 else f"x {factor:.4g}"
