"""A right model is alike on every layout, and each planted mistake is named by module and axis."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness.parity import planted
from torchdistpackage.equivalence.match import difference
from torchdistpackage.errors import ConfigError
from torchdistpackage.harness.parity.layouts import layouts_of
from torchdistpackage.testing import ParityModel, compare_layouts

AXES = {"data": 2, "context": 2, "tensor": 2}
EVERY = layouts_of(AXES)
assert len(EVERY) == 7
MISTAKES = {
    "copy": ("second.mlp", {"tensor"}, "a gradient that nobody sums over tensor"),
    "reduce": ("second.mlp", {"tensor"}, "parts of a sum that nobody adds up"),
    "bias": ("second.mlp", {"tensor"}, "is added on every rank, as a bias"),
    "norm": ("second.mlp.norm", {"tensor"}, "a norm over a part"),
    "init": ("head", {"tensor"}, "initial weights that a rank draws"),
    "dropout apart": ("first.drop", {"tensor"}, "dropout drawn apart"),
    "dropout alike": ("first.drop", {"data"}, "dropout drawn alike"),
    "buffer": ("second.track", {"data", "context"}, "a buffer that is not reduced"),
    "mask": ("second.mixer", {"context"}, "a mask"),
    "positions": ("positions", {"context"}, "positions"),
    "loss": ("loss", {"data", "context"}, "unequal counts"),
    "own lines": ("second", {"data"}, "over the samples of one rank"),
    "gather": ("second.mixer", {"context"}, "whose backward is not that of its forward"),
    "same data": ("data", {"data"}, "ranks that read the same samples"),
    "hook": ("second.mixer.out", {"data", "context"}, "summed where the mean belongs"),
    "backward": ("second.norm", {"data"}, "whose backward is not that of its forward"),
}
"""What is wrong -> the module that is named, the axes that alone show it, words of the cause."""


@pytest.mark.parametrize(
    "layouts",
    [[{"context": 2}, {"data": 2, "tensor": 2}], pytest.param(EVERY, marks=pytest.mark.full)],
    ids=["two", "every"],
)
def test_a_right_model_prints_one_line(pool, layouts):
    build, batch = planted.planted("")
    report = compare_layouts(build, batch, layouts, pool=pool)
    assert report.is_right, str(report)
    assert len(report.findings) == len(layouts) and "\n" not in str(report)


@pytest.mark.few(2)
@pytest.mark.parametrize("wrong", MISTAKES)
def test_a_planted_mistake_is_named_by_module_and_axis(pool, wrong: str):
    module, axes, cause = MISTAKES[wrong]
    build, batch = planted.planted(wrong)
    report = compare_layouts(build, batch, [{axis: 2} for axis in AXES], pool=pool)
    found = {next(iter(axes)): finding for axes, finding in report.findings if finding}
    assert set(found) == axes, str(report)
    for finding in found.values():
        assert finding.module == module, str(report)
        assert cause in finding.cause, str(report)


def test_a_part_is_found_wherever_it_was_cut():
    whole = torch.arange(48.0).double().reshape(6, 8)
    assert difference(whole[[4, 1]], whole) == 0.0
    assert difference(whole[:, 4:], whole) == 0.0
    assert difference(whole[2:4, 2:4], whole) == 0.0
    assert difference(whole[:, :3] + 1e-3, whole) == pytest.approx(1e-3 / 47)
    fused = torch.arange(72.0).double().reshape(6, 12)  # two ranks have one of each pair of columns
    assert difference(fused[:, [0, 1, 4, 5, 8, 9]], fused) == 0.0
    assert difference(fused[[4, 1]][:, [2, 3, 6, 7, 10, 11]], fused) == 0.0
    assert difference(fused[:, [0, 1, 4, 5, 8, 9]] + 0.25, fused) > 1e-3
    assert difference(whole[0], whole) is None and difference(torch.zeros(7, 8), whole) is None
    nan = whole.clone()
    nan[0, 0] = float("nan")
    assert difference(nan, whole) > 1


PROGRAM = """
import sys
from pathlib import Path
from functools import partial
import tests.harness.parity.planted as planted
from torchdistpackage.testing import compare_layouts

def build(wrong):
    return planted.build(wrong)

def batch(*place):
    return planted.batch(*place)

if __name__ == "__main__":
    print(compare_layouts(partial(build, sys.argv[1]), batch, [{"tensor": 2}]))
"""


@pytest.mark.full
def test_functions_of_the_program_itself_are_found_by_its_ranks(tmp_path):
    (tmp_path / "mine.py").write_text(PROGRAM)
    words = [sys.executable, str(tmp_path / "mine.py"), "reduce"]
    env = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("tensor 2: second.mlp: outputs"), done.stdout + done.stderr


def nothing() -> None:
    return None


@pytest.mark.parametrize(
    ("build", "layouts", "said"),
    [
        (planted.build, [], "no layout has several ranks"),
        (planted.build, [{"data": 4, "tensor": 4}], "16 ranks, but at most 8 are allowed"),
        (planted.build, [{"data": 0}], "data=0 is not a number of ranks"),
        (nothing, [{"data": 2}], "return a ParityModel"),
    ],
)
def test_what_cannot_be_compared_is_refused(pool, build, layouts, said):
    with pytest.raises(ConfigError, match=said):
        compare_layouts(build, planted.batch, layouts, pool=pool)


def fails(wrong: str = "") -> ParityModel:
    from torchdistpackage import tpc
    from torchdistpackage.errors import LayoutError

    if tpc.get_group_size("tensor") > 1:
        raise LayoutError("second.mlp: 7 channels for 2 ranks")
    return planted.build()


def test_a_layout_that_raises_is_a_finding(pool):
    report = compare_layouts(fails, planted.batch, [{"data": 2}, {"tensor": 2}], pool=pool)
    assert [finding is None for _, finding in report.findings] == [True, False]
    assert "7 channels for 2 ranks" in str(report) and report.first[1].module == "second.mlp"


def raises(wrong: str = "") -> ParityModel:
    """A module whose forward ends by an error on one rank; the other one waits for it."""
    from torchdistpackage import tpc

    model = planted.build()
    if tpc.get_group_size("tensor") > 1 and tpc.get_group_rank("tensor") == 1:
        model.module.get_submodule("second.norm").weight = torch.nn.Parameter(torch.ones(7))
    return model


def test_a_module_that_raises_on_one_rank_is_named_with_rank_and_line(pool):
    report = compare_layouts(raises, planted.batch, [{"tensor": 2}, {"data": 2}], pool=pool)
    (_, finding), (_, other) = report.findings
    assert other is None and (finding.module, finding.rank) == ("second.norm", 1), str(report)
    assert "rank 1 ends by RuntimeError" in str(report) and "planted.py:" in finding.cause
    assert "Traceback" in finding.detail
