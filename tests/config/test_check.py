"""All rules are tried on every run, except those whose keys are wrong already."""

from typing import Any

import pytest

from torchdistpackage.config.check import failed_rules, violations
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.load import loads
from torchdistpackage.config.schema import RunConfig


def run(**values: Any) -> RunConfig:
    """A run from dotted names with `__` for the dot, not checked across sections."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        section, _, key = name.partition("__")
        tree.setdefault(section, {})[key] = value
    return RunConfig.model_validate(tree)


LATE = {"steps": "2..3"}
"""Ends after a run of one step."""


def test_all_violations_come_at_once() -> None:
    sizes = {"model__mlp_ratio": 0.03, "model__vocab": 9}
    config = run(parallel__data=2, parallel__tensor=5, **sizes, train__steps=1, train__profile=LATE)
    paths = [problem.path for problem in violations(config, 8)]
    assert paths == [
        "parallel.data",
        "model.heads",
        "model.mlp_ratio",
        "model.vocab",
        "train.profile.steps",
    ]


def test_the_world_beats_the_local_processes() -> None:
    """Under a launcher `procs` says nothing; alone it is the world."""
    config = run(parallel__pipe=2, launch__local={"procs": 3})
    assert [p.path for p in violations(config)] == ["launch.local.procs"]
    assert violations(config, 4) == ()


def test_auto_data_is_judged_with_the_world_it_gets() -> None:
    config = run(data__global_batch=32, pipeline__microbatches=4)
    assert violations(config) == () == violations(config, 8)
    (problem,) = violations(config, 16)
    assert "cut 2 samples" in problem.text and "parallel.data=16" in problem.text


@pytest.mark.parametrize("bad", ["model.heads", "model", "", "model.heads.x", "model.heads[0]"])
def test_a_rule_is_left_out_when_its_keys_are_wrong(bad: str) -> None:
    config = run(model__heads=3, train__steps=1, train__profile=LATE)
    assert "model.dim" in [p.path for p in violations(config)]
    found = [keys[0] for keys, _ in failed_rules(config, bad={bad})]
    assert "model.dim" not in found
    assert ("train.profile.steps" in found) == bool(bad)


def test_loading_points_at_the_key_the_user_wrote() -> None:
    """A rule reads several keys; the one on the command line, or else in the file, is at fault."""
    with pytest.raises(ConfigErrors) as caught:
        loads("model:\n  heads: 3\n", "r.yaml")
    assert str(caught.value.problems[0]).startswith("r.yaml:2: model.heads: model.dim=128 is not a")
    with pytest.raises(ConfigErrors) as caught:
        loads("train:\n  profile: {steps: 11..12}\n", "r.yaml", ["train.steps=10"])
    assert str(caught.value.problems[0]).startswith("command line: train.steps=10: train.profile.")
