"""Long messages travel in even pieces, so that none is much shorter than the others."""

import pytest
import torch

from torchdistpackage.comm.transport.pairwise import PIECE_BYTES, _pieces

ONE = PIECE_BYTES // 4


@pytest.mark.parametrize(
    ("num_elements", "num_pieces"),
    [(0, 0), (1, 1), (ONE, 1), (ONE + 1, 1), (ONE * 3 // 2 - 1, 1), (2 * ONE + 7, 2), (9 * ONE, 9)],
)
def test_a_message_a_little_over_a_piece_does_not_leave_a_crumb(num_elements, num_pieces):
    x = torch.arange(num_elements, dtype=torch.float32)
    found = list(_pieces(x))
    assert len(found) == num_pieces
    lengths = [len(piece) for piece in found]
    assert all(length * 4 <= PIECE_BYTES * 3 // 2 for length in lengths)
    assert not lengths or max(lengths) - min(lengths) < num_pieces
    assert not lengths or torch.equal(torch.cat(found), x)
