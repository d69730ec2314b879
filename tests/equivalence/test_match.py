"""What the parts of a tensor on ranks say of the whole."""

import torch

from torchdistpackage.equivalence.match import missing_place


def test_columns_on_no_rank_are_missed_where_every_part_is_columns():
    whole = torch.arange(16.0).reshape(4, 4)
    left, right = whole[:, :2], whole[:, 2:]
    assert missing_place((left, left), whole)
    assert not missing_place((left, right), whole)
    assert not missing_place((whole[0], whole[0]), whole[0])
