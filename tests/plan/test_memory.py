"""Bytes of a rank under each ZeRO stage: whole, or the part of one of those that share."""

import pytest

from torchdistpackage.config.load import loads
from torchdistpackage.config.schema import PrecisionSection
from torchdistpackage.layout.layout import Layout
from torchdistpackage.plan.memory import MemoryEstimate, memory
from torchdistpackage.topology.mesh import topology

LAYOUTS = [Layout("w", (64, 48), (("tensor",), ())), Layout("b", (64,))]
WORLD = topology((("data", 4), ("tensor", 2)), 8)
COUNT = 64 * 48 // 2 + 64


def held(zero: int, *more: str) -> MemoryEstimate:
    one = "parallel: {data: 4}\npipeline: {microbatches: 1}"
    config = loads(one, overrides=[f"parallel.zero={zero}", *more])
    return memory(config, WORLD, LAYOUTS, 5)


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"), [(0, 4, 4, 8), (1, 4, 4, 2), (2, 4, 1, 2)]
)
def test_each_stage_leaves_one_thing_more_in_parts(zero, weights, gradients, optimizer):
    expected = MemoryEstimate(weights * COUNT, gradients * COUNT, optimizer * COUNT)
    assert held(zero) == expected
    assert expected.state_bytes == (weights + gradients + optimizer) * COUNT


def test_stage_3_has_a_quarter_of_everything():
    assert held(3) == MemoryEstimate(COUNT, COUNT, 2 * COUNT)


def test_gradients_of_several_microbatches_are_whole_beside_their_part():
    assert held(2, "pipeline.microbatches=4").gradients_bytes == 5 * COUNT
    assert held(1, "pipeline.microbatches=4") == held(1)


def test_narrow_weights_have_a_wide_copy_in_parts_and_one_wide_bucket():
    narrow = ["precision.dtype=bf16", "precision.weights=bf16"]
    assert held(1, *narrow) == MemoryEstimate(2 * COUNT, 4 * COUNT, 3 * COUNT)
    assert held(3, *narrow) == MemoryEstimate(0, COUNT, 3 * COUNT)
    assert held(1, "precision.dtype=bf16") == held(1)


def test_copies_of_gradients_that_travel_narrow_count_until_all_have_arrived():
    """Without ZeRO; under it sums arrive in pieces, which count in no type."""
    narrow = "precision.reduce_dtype=bf16"
    assert held(0, narrow).gradients_bytes == (4 + 2) * COUNT
    assert held(0, narrow, "precision.dtype=bf16").gradients_bytes == (4 + 2) * COUNT
    assert held(1, narrow) == held(1)


def test_narrow_types_are_asked_for():
    assert PrecisionSection().weights == "float32"
