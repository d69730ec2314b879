"""What is sent in a bench, and what must arrive.

One rule: both are the coded numbers of harness/coded.py, of the positions in the unit, so the
expected data follows from the unit's size alone and is exact in every element type.
"""

import torch
from torch import Tensor

from torchdistpackage.harness.coded import Like, expected_sum, rank_pattern, reduce_input
from torchdistpackage.harness.operations import COLLECTIVES

SUMMED = ("all_reduce", "reduce_scatter")


def make_input(operation: str, index: int, size: int, num_elements: int, like: Like) -> Tensor:
    """What position `index` of a unit of `size` ranks gives; `num_elements` are those counted."""
    if operation in SUMMED:
        return reduce_input(index, range(size), num_elements, like)
    return rank_pattern(index, COLLECTIVES[operation].input_bytes(num_elements, size), like)


def expected(operation: str, index: int, size: int, num_elements: int, like: Like) -> Tensor | None:
    """What position `index` must have afterwards; None where it receives nothing."""
    if operation == "p2p":
        return rank_pattern(0, num_elements, like) if index == 1 else None
    if operation == "p2p_both":
        return rank_pattern(1 - index, num_elements, like)
    if operation == "broadcast":
        return rank_pattern(0, num_elements, like)
    if operation == "all_reduce":
        return expected_sum(range(size), num_elements, like)
    part = num_elements // size
    if operation == "reduce_scatter":
        return expected_sum(range(size), part, like, first=index * part)
    first = index * part if operation == "all_to_all" else 0
    return torch.cat([rank_pattern(sender, part, like, first) for sender in range(size)])
