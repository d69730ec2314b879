"""What the parts of a tensor on ranks say of the whole."""

import torch

from torchdistpackage.equivalence.match import missing_place, rows_found


def test_columns_on_no_rank_are_missed_where_every_part_is_columns():
    whole = torch.arange(16.0).reshape(4, 4)
    left, right = whole[:, :2], whole[:, 2:]
    assert missing_place((left, left), whole)
    assert not missing_place((left, right), whole)
    assert not missing_place((whole[0], whole[0]), whole[0])


def test_complex_tables_are_looked_at_as_pairs_of_numbers():
    whole = torch.arange(16.0).reshape(4, 4) * (1 + 2j)
    left, right = whole[:, :2], whole[:, 2:]
    assert missing_place((left, left), whole)
    assert not missing_place((left, right), whole)
    assert rows_found(whole[1:3], whole) == {1, 2}
