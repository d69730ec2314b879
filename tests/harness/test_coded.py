"""Data from which a wrong rank, order or place shows, in every dtype."""

import pytest
import torch

from torchdistpackage.harness.verify.coded import compare, summand, total, written_by

CPU = torch.device("cpu")
MOVED = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
SUMMED = [torch.float32, torch.int64, torch.bfloat16]


@pytest.mark.parametrize("dtype", [*MOVED, torch.complex64], ids=str)
def test_each_rank_writes_its_own_and_exactly(dtype):
    wide = [written_by(rank, 200, (torch.int64, CPU)) for rank in range(300)]
    narrow = [written_by(rank, 200, (dtype, CPU)) for rank in range(300)]
    assert len({tuple(row[:16].tolist()) for row in wide}) == 300
    assert all(torch.equal(n.real.long(), w) for n, w in zip(narrow, wide, strict=True))


def test_a_shift_shows():
    row = written_by(5, 200, (torch.int64, CPU))
    assert all(bool((row[:-k] != row[k:]).any()) for k in range(1, 100))


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
@pytest.mark.parametrize("size", [2, 7, 256])
def test_sums_are_exact_in_every_order(dtype, size):
    ranks = range(3, 3 + size)
    added = torch.zeros(100, dtype=dtype)
    for rank in reversed(ranks):
        added += summand(rank, 100, (dtype, CPU))
    assert compare(added, total(ranks, 100, (dtype, CPU))) == ""


def test_what_differs_is_told_with_both_values():
    x = torch.arange(6.0).view(2, 3)
    wrong = x.clone()
    wrong[1, 0] = wrong[1, 2] = float("nan")
    assert compare(x, x.clone()) == ""
    assert compare(wrong, x) == "got nan at element 3, expected 3 (2 of 6 elements differ)"
    assert compare(x.view(-1), x) == "got float32[6], expected float32[2, 3]"
    assert compare(x.double(), x) == "got float64[2, 3], expected float32[2, 3]"
