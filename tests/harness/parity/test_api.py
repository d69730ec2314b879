"""`prove` of loops of one's own: right ones are alike, and mistakes are named with their stage."""

import pytest

from tests.harness.parity import own_loops
from torchdistpackage.errors import ConfigError
from torchdistpackage.testing import ParityModel, prove

DATA = [{"data": 2}]
MISTAKES = {
    "state": (0, "state", "optimizer state", "", "data"),
    "rate": (0, "update", "learning rate", "x 2", "data"),
    "update": (0, "update", "update", "", "data"),
    "missing": (0, "gradient", "not reached", "missing on rank 1", "data"),
    "no state": (0, "state", "state after a resume", "", "resume"),
    "second": (0, "state", "state after a resume", "", "resume"),
    "random": (0, "random", "random state after a resume", "on rank 1", "data and resume"),
}
"""What is wrong -> the stage of ZeRO, and the stage, kind, factor and axis that are named."""


@pytest.mark.parametrize("zero", [0, 1, pytest.param(3, marks=pytest.mark.full)])
def test_a_right_loop_is_alike(pool, zero: int):
    report = prove(own_loops.planted("", zero), own_loops.batch, DATA, pool=pool)
    assert report.is_right, str(report)


@pytest.mark.few(3)
@pytest.mark.parametrize("wrong", MISTAKES)
def test_a_mistake_is_named_with_its_stage_kind_and_factor(pool, wrong: str):
    zero, stage, kind, factor, axis = MISTAKES[wrong]
    report = prove(own_loops.planted(wrong, zero), own_loops.batch, DATA, pool=pool)
    assert report.first is not None, wrong
    _, found = report.first
    assert (found.stage, found.kind, found.factor) == (stage, kind, factor), str(report)
    assert found.axis == axis
    assert ("stop 2" in found.what) == (wrong == "second"), str(report)


def half() -> ParityModel:
    model = own_loops.build()
    return ParityModel(model.module, model.step, save=model.save)


def test_save_without_load_is_refused(pool):
    with pytest.raises(ConfigError, match="save without load"):
        prove(half, own_loops.batch, DATA, pool=pool)
