"""Data that says which rank wrote it, and what is left of it after an operation.

One rule: every number is whole and small, so each dtype holds it exactly, and it names its global
rank and its place: what comes from another rank, in another order or shifted, differs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchdistpackage.comm.record import dtype_name

Like = tuple[torch.dtype, torch.device]

EXACT_TO = {torch.bfloat16: 2**8, torch.float16: 2**11}
"""The whole numbers up to here that a narrow dtype holds: so many ranks can be summed in it."""

_DIGIT_BITS, _NUM_DIGITS = 4, 8
_NUM_BITS = 16


def written_by(rank: int, number: int, like: Like) -> Tensor:
    """(number,) whole numbers up to 255: a digit of the rank, in turn, and one of the place."""
    dtype, device = like
    place = torch.arange(number, device=device)
    digit = (rank >> (place % _NUM_DIGITS * _DIGIT_BITS)) & 15
    value = 16 * digit + place // _NUM_DIGITS % 16
    return (value * (1 - 2j) if dtype.is_complex else value).to(dtype)


def summand(rank: int, number: int, like: Like) -> Tensor:
    """The same for sums: in a narrow dtype only a bit of the rank, so that they stay exact."""
    dtype, device = like
    if dtype not in EXACT_TO:
        return written_by(rank, number, like)
    return ((rank >> (torch.arange(number, device=device) % _NUM_BITS)) & 1).to(dtype)


def total(ranks: Sequence[int], number: int, like: Like) -> Tensor:
    """What the summands of these ranks add up to."""
    wide = torch.zeros(number, dtype=torch.int64, device=like[1])
    for rank in ranks:
        wide += summand(rank, number, like).long()
    return wide.to(like[0])


def compare(got: Tensor, expected: Tensor) -> str:
    """Which element is wrong, with both values; "" if none is."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"got {_shape(got)}, expected {_shape(expected)}"
    different = got != expected
    if not bool(different.any()):
        return ""
    at = int(different.int().flatten().argmax())
    return (
        f"got {_value(got, at)} at element {at}, expected {_value(expected, at)} "
        f"({int(different.sum())} of {got.numel()} elements differ)"
    )


def _shape(x: Tensor) -> str:
    return f"{dtype_name(x.dtype)}{list(x.shape)}"


def _value(x: Tensor, at: int) -> str:
    value = x.flatten()[at].item()
    return str(value) if isinstance(value, complex) else f"{value:g}"
