"""`prove` of loops with Pipeline, split layers and ZeroOptimizer: right, and with a mistake."""

from functools import partial

import pytest

from tests.harness.parity import own_loops, part_loops
from torchdistpackage.testing import prove


def test_a_right_pipeline_is_alike(pool):
    report = prove(partial(part_loops.pipeline, ""), part_loops.batch, [{"pipe": 2}], pool=pool)
    assert report.is_right, str(report)


def test_a_mistake_between_stages_is_named_with_its_module(pool):
    build = partial(part_loops.pipeline, "halved")
    report = prove(build, part_loops.batch, [{"pipe": 2}], pool=pool)
    assert report.first is not None
    _, found = report.first
    assert (found.stage, found.axis) == ("gradient", "pipe"), str(report)
    assert found.module.split(".")[0] == "1", str(report)


def test_right_layers_of_tensor_ranks_are_alike(pool):
    layouts = [{"tensor": 2}, {"data": 2, "tensor": 2}]
    report = prove(partial(part_loops.shared_layers, ""), part_loops.batch, layouts, pool=pool)
    assert report.is_right, str(report)


@pytest.mark.full
def test_layers_that_each_rank_draws_for_itself_are_named(pool):
    build = partial(part_loops.shared_layers, "drawn")
    report = prove(build, part_loops.batch, [{"tensor": 2}], pool=pool)
    assert report.first is not None
    _, found = report.first
    assert (found.stage, found.kind, found.module) == ("start", "initial weights", "1.up")


@pytest.mark.parametrize(
    ("wrong", "stage", "axis"),
    [("state", "state", "data"), ("update", "update", "data"), ("no state", "state", "resume")],
)
def test_a_mistake_under_zero_is_named_with_its_stage(pool, wrong: str, stage: str, axis: str):
    report = prove(own_loops.planted(wrong, 1), own_loops.batch, [{"data": 2}], pool=pool)
    assert report.first is not None
    _, found = report.first
    assert found.stage == stage and axis in found.axis, str(report)
