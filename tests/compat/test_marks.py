"""A parameter of the earlier package's blocks knows its layout, whatever replaces it."""

import pytest
from torch import nn

from tests.parallel.tensor.test_marks import survive
from torchdistpackage.compat.torchdistpackage.tensor_blocks import ParallelBlock


def models() -> list[nn.Module]:
    return [ParallelBlock(8, num_heads=2, sequence_parallel=True)]


@pytest.mark.late_in_full
@pytest.mark.parametrize("data", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_mark_survives_what_replaces_parameters(ranks, data):
    ranks(2 * data).run(survive, data, models)
