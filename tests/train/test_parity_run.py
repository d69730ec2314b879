"""`tdp prove` of a configuration: a right run is one line, a planted mistake is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.train.sources import UnevenTokens
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load, loads
from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.parity_model import model_plan
from torchdistpackage.plan.parity_plan import parity_run
from torchdistpackage.plan.run_plan import make_plan, num_ranks
from torchdistpackage.train.parity import compare_plan, compare_run

GPT = ["model.layers=2", "model.dim=32", "model.heads=4", "model.dropout=0.1", "data.seq_len=16"]
OWN = [
    *("data.target=tests.train.sources:Line", "data.args={}"),
    *("model.loss=tests.train.sources:squared_error", "pipeline.microbatches=2"),
]


def compared(overrides: list[str], pool):
    config = loads("launch: {local: {procs: null}}", overrides=overrides)
    return compare_run(parity_run(make_plan(config, num_ranks(config))), pool)


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.data=2", "parallel.pipe=2"],
        pytest.param(
            ["parallel.data=2", "parallel.pipe=2", "parallel.tensor=2", "pipeline.schedule=zb-h1",
             "parallel.sequence_parallel=true"], marks=pytest.mark.full,
        ),
        pytest.param(
            ["parallel.data=2", "parallel.zero=2", "parallel.tensor=2"], marks=pytest.mark.full,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_right_run_is_one_line(pool, layout):
    report = compared([*GPT, *layout], pool)
    assert report.is_right, str(report)


class InOrder(UnevenTokens):
    """Begins a step where the one before has ended, as a file of texts does."""

    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        begin = (step - 1) * num_data * per_rank + data_index * per_rank + first
        rows = [self._row(split, seed, 0, begin + i) for i in range(per_rank)]
        return torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def test_micro_batches_are_right_where_a_smaller_batch_comes_to_other_samples(pool):
    """Those of a mixture all get the samples of the first, so their batch is a part."""
    data = [
        "data.target=tests.train.test_parity_run:InOrder",
        "data.args={seq_len: 16, vocab: 256}",
    ]
    words = ["model.moe.num_experts=2", "pipeline.microbatches=2", "parallel.data=2"]
    config = loads("launch: {local: {procs: null}}", overrides=[*GPT, *data, *words])
    run = parity_run(make_plan(config, num_ranks(config)))
    assert [x.alike for x in run.features] == [True]
    report = compare_run(replace(run, layouts=[]), pool, resumes=False)
    assert report.is_right, str(report)


class Scaled(nn.Module):
    """Divides by the number of samples that it gets, which is that of a microbatch of one rank."""

    def forward(self, x):
        return x / x.shape[0]


def build_wrong(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), Scaled(), nn.Linear(width, 1))


def test_a_mistake_in_a_model_of_ones_own_is_named_by_module_and_axis(pool):
    target = "model.target=tests.train.test_parity_run:build_wrong"
    report = compared([*OWN, target, "model.args={width: 8}", "parallel.data=2"], pool)
    (_, rounds), (axes, finding) = report.findings
    # it is one of micro-batches too
    assert (rounds.module, rounds.axis) == ("1", "accumulation"), str(report)
    assert axes == {"data": 2} and finding.module == "1", str(report)
    assert "over the samples of one rank" in finding.cause


def build_sized(least: int, width: int = 64) -> nn.Module:
    """Is refused in its own size, or in any other."""
    if (width == 64) != (least == 64):
        raise ValueError(f"not with a width of {width}")
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))


@pytest.mark.parametrize("least", [1, 64])
def test_a_model_of_ones_own_is_made_smaller_if_it_can_be(pool, least: int):
    words = [*OWN, "model.target=tests.train.test_parity_run:build_sized", "parallel.data=2"]
    config = loads(
        "launch: {local: {procs: null}}", overrides=[*words, f"model.args={{least: {least}}}"]
    )
    said: list[str] = []
    report = compare_plan(make_plan(config, num_ranks(config)), said.append, pool)
    assert report.is_right, str(report)
    own_size = [line for line in said if "compared in its own size" in line]
    assert len(own_size) == (least == 64) and said[-1].startswith("1 of 1, data 2: the same")
    assert all("not with a width of 32" in line for line in own_size)


CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.full
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_right(pool, path: Path):
    config = load(str(path), ["data.name=python_stdlib", "data.path=null", "model.vocab=256"])
    plan = make_plan(config, num_ranks(config))
    report = compare_plan(plan, lambda line: None, pool, "this")
    assert report.is_right, str(report)


@pytest.mark.full
def test_every_class_of_transformers_is_right(pool, tmp_path: Path):
    """Those of docs/model_classes.md; an axis that a class refuses is left out."""
    from tests.models import coverage  # loads transformers

    wrong: dict[str, str] = {}
    for name in coverage.names():
        folder, small = tmp_path / name, tmp_path / name / "small"
        small.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(coverage.settings(name)))
        try:
            plan, _ = model_plan(str(folder), [], small)
        except ConfigError:
            continue  # no axis is left
        report = compare_plan(plan, lambda line: None, pool)
        if not report.is_right:
            wrong[name] = str(report)
    assert wrong == {}


def test_one_rank_is_refused(tmp_path: Path, capsys):
    (tmp_path / "run.yaml").write_text("parallel: {data: 1}\n")
    assert main(["prove", str(tmp_path / "run.yaml")]) == 2
    assert "this run has one rank" in " ".join(capsys.readouterr().err.split())
