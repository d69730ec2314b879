"""Data that says which rank wrote it and where, and what is left of it after an operation.

One rule: every number is whole and from 1 to 61, so each dtype holds it exactly, and it follows
from the rank and the place as if drawn by lot: what comes from another rank, shifted, or with
parts exchanged differs almost everywhere. Where a sum is formed, each place has one rank that
writes its number there, and so the sums are such numbers too, at any number of ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchdistpackage.comm.flight_recorder import dtype_name

Like = tuple[torch.dtype, torch.device]

LARGEST = 61
"""Of the numbers. It is prime: ranks fewer than that apart differ at every place. None is 0, so
what was never written shows in a room of zeros."""

_EXACT_TO = {
    torch.int8: 2**7 - 1,
    torch.uint8: 2**8 - 1,
    torch.bfloat16: 2**8,
    torch.float16: 2**11,
}
_BY_RANK, _BY_PLACE, _MODULUS = 17, 1_103_515_245, 2**31 - 1


def rank_pattern(rank: int, number: int, like: Like, first: int = 0) -> Tensor:
    """(number,) numbers of the endless row of `rank`, from place `first` on."""
    return _in(like[0], _drawn(rank, _places(first, number, like)))


def reduce_input(rank: int, ranks: Sequence[int], number: int, like: Like) -> Tensor:
    """(number,) what one of `ranks` adds: its numbers at every len(ranks)-th place, else nothing.

    And a one everywhere, unless so many ones are more than the dtype holds exactly.
    """
    mine = _places(0, number, like) % len(ranks) == ranks.index(rank)
    return rank_pattern(rank, number, like) * mine + _ones(len(ranks), like[0])


def expected_sum(ranks: Sequence[int], number: int, like: Like, first: int = 0) -> Tensor:
    """What the summands of these ranks add up to, from place `first` on."""
    return expected_max(ranks, number, like, first) + (len(ranks) - 1) * _ones(len(ranks), like[0])


def expected_max(ranks: Sequence[int], number: int, like: Like, first: int = 0) -> Tensor:
    """The largest of their summands."""
    places = _places(first, number, like)
    owners = torch.tensor(ranks, device=like[1])[places % len(ranks)]
    return _in(like[0], _drawn(owners, places)) + _ones(len(ranks), like[0])


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


def _drawn(ranks: int | Tensor, places: Tensor) -> Tensor:
    # of the square of a place, as a shift by any number of places must not be one of the values
    lot = (places + 1) ** 2 % _MODULUS * (_BY_PLACE + ranks // LARGEST) % _MODULUS
    return (lot + ranks * _BY_RANK) % LARGEST + 1


def _ones(num_ranks: int, dtype: torch.dtype) -> int:
    """What each rank gives beside its own numbers."""
    return int(num_ranks + LARGEST <= _EXACT_TO.get(dtype, 2**24))


def _in(dtype: torch.dtype, numbers: Tensor) -> Tensor:
    return (numbers * (1 - 2j) if dtype.is_complex else numbers).to(dtype)


def _places(first: int, number: int, like: Like) -> Tensor:
    return torch.arange(first, first + number, device=like[1])


def _shape(x: Tensor) -> str:
    return f"{dtype_name(x.dtype)}{list(x.shape)}"


def _value(x: Tensor, at: int) -> str:
    value = x.flatten()[at].item()
    return str(value) if isinstance(value, complex) else f"{value:g}"
