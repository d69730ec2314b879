"""Data from which a wrong rank, order or place shows, in every dtype."""

import pytest
import torch

from torchdistpackage.harness.calls import (
    compare,
    expected_max,
    expected_sum,
    rank_pattern,
    reduce_input,
)

CPU = torch.device("cpu")
WIDE = torch.int64, CPU
MOVED = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]
MOVED += [torch.uint8, torch.int8]
SUMMED = [torch.float32, torch.int64, torch.bfloat16, torch.float16, torch.int8, torch.uint8]
SIZES = [2, 3, 4, 5, 6, 7, 8, 64, 1000]


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [*MOVED, torch.complex64], ids=str)
def test_each_rank_writes_its_own_and_exactly(dtype):
    wide = [rank_pattern(rank, 200, WIDE) for rank in range(3000)]
    narrow = [rank_pattern(rank, 200, (dtype, CPU)) for rank in range(300)]
    assert len({tuple(row[:8].tolist()) for row in wide}) == 3000
    assert all(torch.equal(n.real.long(), w) for n, w in zip(narrow, wide, strict=False))
    assert all(bool((row > 0).all()) for row in wide), "zeros are what nobody has written"


def test_ranks_that_are_near_differ_at_every_place():
    rows = torch.stack([rank_pattern(rank, 1000, WIDE) for rank in range(60)])
    assert all(len(set(column.tolist())) == 60 for column in rows.T)


@pytest.mark.few(2)
@pytest.mark.parametrize("start", [0, 10**6, 2**33], ids=str)
@pytest.mark.parametrize("row", [rank_pattern, None], ids=["written", "summed"])
def test_any_shift_and_any_exchange_of_blocks_shows(row, start):
    """Chunk errors are of powers of two, often; none may be a period."""
    number = 40_000
    if row is None:
        x = expected_sum(range(4), number, WIDE, first=start)
    else:
        x = row(3, number, WIDE, first=start)
    for by in [*range(1, 300), *(61 * k for k in range(1, 300)), *(2**k for k in range(9, 15))]:
        assert float((x[by:] != x[:-by]).double().mean()) > 0.9, by
    for block in (2**k for k in range(3, 14)):
        y = x.clone()
        y[:block], y[block : 2 * block] = x[block : 2 * block], x[:block]
        assert compare(y, x)


@pytest.mark.parametrize("size", SIZES)
def test_sums_differ_by_place_and_part(size):
    parts = expected_sum(range(size), 40 * size, (torch.int8, CPU)).view(size, 40)
    assert len({tuple(part.tolist()) for part in parts}) == size
    assert all(len(part.unique()) > 10 for part in parts)


@pytest.mark.few(8)
@pytest.mark.parametrize("dtype", SUMMED, ids=str)
@pytest.mark.parametrize("size", [1, *SIZES])
def test_sums_are_exact_in_every_order(dtype, size):
    ranks = range(3, 3 + size)
    summands = [reduce_input(rank, ranks, 100, (dtype, CPU)) for rank in ranks]
    added = torch.zeros(100, dtype=dtype)
    for x in reversed(summands):
        added += x
    assert compare(added, expected_sum(ranks, 100, (dtype, CPU))) == ""
    most = torch.stack(summands).amax(dim=0)
    assert compare(most, expected_max(ranks, 100, (dtype, CPU))) == ""


@pytest.mark.parametrize("dtype", SUMMED, ids=str)
@pytest.mark.parametrize("size", [2, 8, 64])
def test_one_summand_too_few_or_twice_shows_at_every_place(dtype, size):
    like, ranks = (dtype, CPU), range(size)
    right = expected_sum(ranks, 50, like)
    for x in (reduce_input(rank, ranks, 50, like) for rank in ranks):
        assert bool((right - x != right).all()) and bool((right + x != right).all())


def test_what_differs_is_told_with_both_values():
    x = torch.arange(6.0).view(2, 3)
    wrong = x.clone()
    wrong[1, 0] = wrong[1, 2] = float("nan")
    assert compare(x, x.clone()) == ""
    assert compare(wrong, x) == "got nan at element 3, expected 3 (2 of 6 elements differ)"
    assert compare(x.view(-1), x) == "got float32[6], expected float32[2, 3]"
    assert compare(x.double(), x) == "got float64[2, 3], expected float32[2, 3]"
