"""How wrong numbers follow from the right ones."""

import math

import pytest
import torch

from torchdistpackage.equivalence.factor import factor_of, ratio_text

AXES = {"data": 2, "tensor": 4}
FULL = torch.arange(1.0, 33.0, dtype=torch.float64).reshape(4, 8).square().sin()


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (2.0, "x 2"),
        (0.125, "/ 8"),
        (math.sqrt(2), "x 1.414"),
        (1.0, ""),
        (math.nan, ""),
        (0, "x 0"),
    ],
)
def test_a_ratio_is_written_as_a_size(ratio, text):
    assert ratio_text(ratio, AXES) == text


@pytest.mark.parametrize(
    ("by_rank", "text"),
    [
        ({0: 2 * FULL, 1: 2 * FULL}, "x 2"),
        ({0: FULL / 8, 1: FULL / 8}, "/ 8"),
        ({0: FULL, 1: 4 * FULL}, "x 4 on rank 1"),
        ({0: FULL, 1: 0 * FULL}, "missing on rank 1"),
        ({0: 2 * FULL[:, :4], 1: 2 * FULL[:, 4:]}, "x 2"),
        ({0: FULL, 1: FULL}, ""),
        ({0: 2 * FULL, 1: 3 * FULL}, ""),
        ({0: FULL.flip(1), 1: FULL}, ""),
        ({0: FULL + 1e-3, 1: FULL}, ""),
    ],
)
def test_a_factor_is_found_in_any_shard(by_rank, text):
    assert factor_of(by_rank, FULL, AXES) == text
