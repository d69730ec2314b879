"""A row that took another's place, and an auxiliary loss of another scale, are found."""

import torch

from torchdistpackage.equivalence.arrivals import lost_row, uneven_scalar
from torchdistpackage.equivalence.record import ModuleCalls, ParityRecord

ROWS = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)


def record(rows: torch.Tensor, scalar: float = 1.0) -> ParityRecord:
    grads = [rows, torch.tensor([scalar], dtype=rows.dtype)]
    return ParityRecord({}, modules={"mlp": ModuleCalls([rows], [rows], [rows], grads)})


def test_a_row_that_never_came_is_named_with_its_module_and_rank():
    stale = torch.cat([ROWS[:2], ROWS[:2], ROWS[4:]])
    assert lost_row(record(ROWS), [record(ROWS)]) is None
    assert lost_row(record(ROWS), [ParityRecord({}), record(stale)]) == ("mlp", 1, 2)


def test_rows_that_were_changed_are_not_lost():
    assert lost_row(record(ROWS), [record(ROWS + 0.5)]) is None


def test_halves_of_the_rows_together_are_all_of_them():
    assert lost_row(record(ROWS), [record(ROWS[:3]), record(ROWS[3:])]) is None


def test_a_scalar_counts_by_row():
    whole, half = record(ROWS, 6.0), record(ROWS[:3], 3.0)
    assert uneven_scalar(whole, [half, half], "mlp") is None
    assert uneven_scalar(whole, [half, record(ROWS[3:], 6.0)], "mlp") == ("mlp", 2.0)
    assert uneven_scalar(whole, [record(ROWS, 12.0)], "attention") is None
