"""What is sent in a bench, and what must arrive: whole numbers that every element type holds.

One rule: the expected data follows from the ranks alone and is exact. What is only moved is below
113 and differs by sender and place; what is summed is 0 or 1, and at most 34 of the ranks have a 1
at the same place, so that sums are exact in int8 and bf16 as in float64, at any number of ranks.
"""

import torch
from torch import Tensor

from torchdistpackage.harness.cases import CASES

SUMMED = ("all_reduce", "reduce_scatter")
_MODULUS, _STEP, _BY_SENDER = 113, 31, 17
_NUM_ONES = 32

Kind = tuple[torch.dtype, torch.device]


def given(operation: str, index: int, size: int, num_elements: int, kind: Kind) -> Tensor:
    """What position `index` of a unit of `size` ranks gives; `num_elements` are those counted."""
    if operation in SUMMED:
        period = _period(size)
        ones = (_places(0, num_elements, kind) + index) % period == 0
        return ones.to(kind[0])
    part = CASES[operation].input_bytes(num_elements, size)
    return _sent(index, 0, part, kind)


def expected(operation: str, index: int, size: int, num_elements: int, kind: Kind) -> Tensor | None:
    """What position `index` must have afterwards; None where it receives nothing."""
    if operation == "p2p":
        return _sent(0, 0, num_elements, kind) if index == 1 else None
    if operation == "p2p_both":
        return _sent(1 - index, 0, num_elements, kind)
    if operation == "broadcast":
        return _sent(0, 0, num_elements, kind)
    part = num_elements // size
    if operation == "all_gather":
        return torch.cat([_sent(sender, 0, part, kind) for sender in range(size)])
    if operation == "all_to_all":
        return torch.cat([_sent(sender, index * part, part, kind) for sender in range(size)])
    first, number = (index * part, part) if operation == "reduce_scatter" else (0, num_elements)
    period, places = _period(size), _places(first, number, kind)
    # how many multiples of the period lie in [place, place + size)
    ones = (places + size + period - 1) // period - (places + period - 1) // period
    return ones.to(kind[0])


def compare(got: Tensor | None, wanted: Tensor | None) -> str:
    """Which element is not as it should be, with both values; "" if all are."""
    if wanted is None:
        return ""
    if got is None or got.shape != wanted.shape:
        shape = None if got is None else tuple(got.shape)
        return f"got a result of shape {shape}, expected {tuple(wanted.shape)}"
    different = got != wanted
    if not bool(different.any()):
        return ""
    at = int(different.int().argmax())
    return (
        f"got {got[at].item():g} at element {at}, expected {wanted[at].item():g} "
        f"({int(different.sum())} of {len(got)} elements differ)"
    )


def _period(size: int) -> int:
    return max(2, -(-size // _NUM_ONES))


def _sent(sender: int, first: int, number: int, kind: Kind) -> Tensor:
    """(number,) elements of the endless row of `sender`, from place `first` on."""
    turn = 1 + sender // _MODULUS  # from the 114th sender on rows differ by their step
    numbers = (_places(first, number, kind) * (_STEP * turn) + sender * _BY_SENDER) % _MODULUS
    return numbers.to(kind[0])


def _places(first: int, number: int, kind: Kind) -> Tensor:
    return torch.arange(first, first + number, device=kind[1])
