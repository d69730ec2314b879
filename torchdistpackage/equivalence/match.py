"""Comparison of a rank's tensor with the matching slice of the full one, for any cut.

Rows (of the first dim) are searched anywhere, so samples in another order and rows of fused
projections are found; along other dims a slice is contiguous, or along the last one several slices,
like the queries, keys and values of a fused projection on a rank.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

TOLERANCE = 1e-9
"""Largest difference in float64 that counts as equal, relative to the largest number of the full
tensor."""
_MOST_PLACES = 128
_JOINED = (2, 3, 4, 6, 8, 12, 16)
"""Pieces that are tried: three of queries, keys and values, more where these have unlike sizes."""


def difference(part: Tensor, full_tensor: Tensor) -> float | None:
    """Return the largest difference at the best fit of `part`, relative to the full tensor's
    largest number.

    None: it has no shape that a part of `full_tensor` could have.
    """
    if part.dim() != full_tensor.dim():
        return None
    if part.dim() == 0:
        part, full_tensor = part.reshape(1), full_tensor.reshape(1)
    part, full_tensor = _real(part), _real(full_tensor)
    scale = max(float(full_tensor.abs().max()) if full_tensor.numel() else 0.0, 1e-30)
    best = _fit(part, full_tensor, scale)
    if best is not None and best > TOLERANCE * scale:
        best = min(best, _joined(part, full_tensor, scale))
    return None if best is None else best / scale


def elementwise(actual: Tensor, expected: Tensor) -> float | None:
    """Return the largest difference, over the largest expected number.

    None: the shapes differ, or the tensors hold integers, which jump if scores are close.
    """
    is_number = expected.is_floating_point() or expected.is_complex()
    if actual.shape != expected.shape or not is_number:
        return None
    if not expected.numel():
        return 0.0
    a, b = _real(actual.to(expected.device)), _real(expected)
    # float64: the comparison must not round away what it looks for
    finite = torch.nan_to_num(expected.detach().abs().double(), 0.0, 0.0, 0.0)
    return float((a - b).abs().max()) / max(float(finite.max()), 1e-30)


@dataclass(frozen=True)
class Measure:
    """The rule by which two tensors differ.

    tolerance: the difference that is none yet, over the whole tensor's largest number.
    noise, least_noise: gradients that are zero by nature are what rounding leaves of a sum, so any
        may differ by this share of the model's largest one, and by this number.
    apart: the difference of a rank's tensor and the whole one; None: they cannot be compared.
    finds_parts: whether it looks for a part in the whole one.
    """

    tolerance: float = TOLERANCE
    noise: float = 1e-12
    least_noise: float = 0.0
    apart: Callable[[Tensor, Tensor], float | None] = difference
    finds_parts: bool = True


PARTS = Measure()
"""Values of all ranks in float64, wherever their tensors were cut."""


WITH_SINGLE = Measure(tolerance=1e-4, noise=1e-5)
"""Values in float64; some of them were float32 before. Gates that are exponentials, as
of xLSTM, make 1e-5 of its rounding."""


def elementwise_within(tolerance: float, least_noise: float = 0.0) -> Measure:
    """Measure tensors of one shape, element by element."""
    return Measure(tolerance, 0.0, least_noise, elementwise, False)


def _joined(part: Tensor, full_tensor: Tensor, scale: float) -> float:
    """Return the difference if the last dim of `part` joins several pieces of the whole's.

    It is infinity if no number of pieces fits.
    """
    if part.dim() > 1 and part.shape[-1] < full_tensor.shape[-1]:
        for number in (n for n in _JOINED if part.shape[-1] % n == 0):
            largest = 0.0
            for piece in part.chunk(number, -1):
                gap = _fit(piece, full_tensor, scale)
                largest = max(largest, float("inf") if gap is None else gap)
                if largest > TOLERANCE * scale:
                    break
            else:
                return largest
    return float("inf")


def _fit(part: Tensor, full_tensor: Tensor, scale: float) -> float | None:
    """Return the difference where `part` fits best, also with the first two dims merged."""
    best = _best(part, full_tensor, scale)
    if part.dim() > 2 and (best is None or best > TOLERANCE * scale):
        # samples of several microbatches, of a model whose first dim is the sequence
        merged = _best(part.flatten(0, 1), full_tensor.flatten(0, 1), scale)
        best = min((x for x in (best, merged) if x is not None), default=None)
    return best


def _best(part: Tensor, full_tensor: Tensor, scale: float) -> float | None:
    """Return the smallest difference over all pieces of the shape of `part`, or that of the first
    one that fits; None: it is too long.
    """
    if part.shape[0] > full_tensor.shape[0]:
        return None
    best: float | None = None
    for piece in _pieces(part.shape[1:], full_tensor):
        gap = _rows(part, piece, TOLERANCE * scale)
        best = gap if best is None else min(best, gap)
        if best <= TOLERANCE * scale:
            break
    return best


def missing_place(parts: Sequence[Tensor], full_tensor: Tensor) -> bool:
    """Return True if even pieces along dims after the first are on no rank, though every part is
    one.
    """
    parts, full_tensor = [_real(x) for x in parts], _real(full_tensor)
    shape = parts[0].shape[1:]
    if any(x.dim() < 2 or x.shape[1:] != shape for x in (*parts, parts[0])):
        return False
    if any(
        size == 0 or full % size for size, full in zip(shape, full_tensor.shape[1:], strict=True)
    ):
        return False
    scale = max(float(full_tensor.abs().max()) if full_tensor.numel() else 0.0, 1e-30)
    limit = TOLERANCE * scale
    pieces = [*_pieces(shape, full_tensor)]
    fits = [
        {i for i, piece in enumerate(pieces) if _rows(part, piece, limit) <= limit}
        for part in parts
    ]
    num = math.prod(full // size for size, full in zip(shape, full_tensor.shape[1:], strict=True))
    return all(fits) and num <= _MOST_PLACES and len(set().union(*fits)) < num


def rows_found(part: Tensor, full_tensor: Tensor) -> set[int]:
    """Return the rows of `full_tensor` that match rows of `part`."""
    part, full_tensor = _real(part), _real(full_tensor)
    if part.dim() == 0 or part.shape[1:] != full_tensor.shape[1:]:
        return set()
    gaps = _apart(part, full_tensor)
    return set(((gaps <= TOLERANCE).nonzero()[:, 1]).tolist())


def _real(x: Tensor) -> Tensor:
    """Return a tensor as real float64 without NaN and Inf, which become distinct large numbers."""
    x = torch.view_as_real(x) if x.is_complex() else x
    # float64 has room for three numbers that no gradient has
    return torch.nan_to_num(x.detach().to(torch.float64), nan=1e300, posinf=1e301, neginf=-1e301)


def _pieces(shape: torch.Size, full_tensor: Tensor) -> Iterator[Tensor]:
    """Yield the pieces of `full_tensor` with all rows and this shape of a row."""
    starts = []
    for size, full in zip(shape, full_tensor.shape[1:], strict=True):
        if size > full or size == 0:
            return
        starts.append(range(0, full - size + 1, size if full % size == 0 else 1))
    for number, start in enumerate(product(*starts)):
        if number == _MOST_PLACES:
            return
        piece = tuple(slice(a, a + size) for a, size in zip(start, shape, strict=True))
        yield full_tensor[(slice(None), *piece)]


def _rows(part: Tensor, full_tensor: Tensor, limit: float) -> float:
    """Return the distance between the worst matching row and its best match.

    limit: a difference that is none; rows in order are looked at first, and end the search.
    """
    number = part.shape[0]
    if number == 0:
        return 0.0
    for start in range(0, full_tensor.shape[0] - number + 1, number):
        in_order = float((part - full_tensor[start : start + number]).abs().max())
        if in_order <= limit:
            return in_order
    return float(_apart(part, full_tensor).min(dim=1).values.max())


def _apart(part: Tensor, full_tensor: Tensor) -> Tensor:
    """Return the largest difference of each row of `part` to each of `full_tensor`."""
    part, full_tensor = (x.reshape(x.shape[0], -1) for x in (part, full_tensor))
    return torch.cdist(part, full_tensor, p=float("inf"))
