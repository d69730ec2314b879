"""The search finds the layouts that a prediction of every layout would find."""

import os
from dataclasses import replace

import pytest

from torchdistpackage.cli._search import simpler_first
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load, loads
from torchdistpackage.errors import ConfigError, ScheduleError
from torchdistpackage.plan.layout_search import (
    ONE_BACKWARD,
    SCHEDULES,
    LayoutChoice,
    all_layouts,
    live_of,
    memory_limit,
    ordered,
    peak_bytes,
    placement_of,
    search,
)
from torchdistpackage.plan.run_plan import make_plan, splits_backward
from torchdistpackage.plan.step_time import run_time
from torchdistpackage.predict.devices import DEVICES
from torchdistpackage.schedule.engine import TaskGraph
from torchdistpackage.schedule.generators import GENERATORS, TWO_CHUNKS

H100 = DEVICES["h100-sxm"]
DENSE = "model: {{layers: {layers}, dim: 512, heads: 4, vocab: 4096}}\n"
MIXED = (
    "model: {{layers: {layers}, dim: 512, heads: 4, vocab: 4096, mlp: swiglu, norm: rms, "
    "tied: false, moe: {{num_experts: 4, top_k: 2, hidden: 512}}}}\n"
)
REST = (
    "data: {{seq_len: 256, global_batch: {batch}}}\n"
    "precision: {{dtype: bf16, weights: {weights}}}\n"
    "train: {{memory_gb: {gb}, compile: {compiled}}}\n"
)


def run_of(model: str, ranks: int, layers: int, batch: int, gb: float, weights: str, compiled: str):
    text = model + REST
    values = {"layers": layers, "batch": batch, "gb": gb, "weights": weights, "compiled": compiled}
    return loads(text.format(**values), "small", LayoutChoice.overrides()), ranks


def by_force(run, ranks):
    """Seconds of every layout that may run and fits, ascending."""
    seconds: list[float] = []
    for choice in all_layouts(run, ranks):
        try:
            plan = make_plan(choice.of(run, ranks), ranks)
        except (ConfigError, ScheduleError):
            continue
        if peak_bytes(plan, H100) <= memory_limit(run, H100):
            seconds.append(run_time(plan, H100).step.total)
    return sorted(seconds)


_CASE = DENSE, 2, 1, 2, 0.72, "float32", "auto"
_MORE = [
    (model, ranks, layers, batch, gb, weights, compiled)
    for model in (DENSE, MIXED)
    for ranks, layers, batch in ((2, 2, 4), (4, 2, 4), (4, 3, 2))
    for gb, weights, compiled in (
        (10.0, "float32", "off"),
        (1.4, "float32", "auto"),
        (0.9, "bf16", "off"),
        (0.75, "bf16", "auto"),
        (0.72, "float32", "off"),
    )
]


@pytest.mark.parametrize("case", [_CASE, *(pytest.param(x, marks=pytest.mark.full) for x in _MORE)])
def test_a_search_finds_what_brute_force_finds(case):
    run, ranks = run_of(*case)
    expected = by_force(run, ranks)
    result = search(run, ranks, H100)
    assert [x.time.step.total for x in result.found] == pytest.approx(expected[:10], rel=1e-12)
    assert all(x.peak_bytes <= result.limit_bytes for x in result.found)
    if case is _CASE:
        assert result.found and result.least_bytes > result.limit_bytes  # some did not fit


@pytest.mark.parametrize("name", SCHEDULES)
def test_bounds_know_which_schedules_split_their_backward(name):
    chunks = 2 if name in TWO_CHUNKS else 1
    programs = [GENERATORS[name](*x, chunks).programs for x in ((2, 1), (2, 4), (4, 2), (3, 8))]
    assert {splits_backward(x) for x in programs} == {name not in ONE_BACKWARD}


@pytest.mark.parametrize("name", SCHEDULES)
def test_bounds_know_where_stages_are_and_what_ranks_hold(name):
    chunks = 2 if name in TWO_CHUNKS else 1
    for pipe, number in ((2, 1), (2, 4), (4, 2), (3, 8)):
        schedule = GENERATORS[name](pipe, number, chunks)
        assert placement_of(name, pipe, chunks) == schedule.placement
        _, live = ordered(name, pipe, number, chunks)
        assert live_of(name, pipe, number) in (None, tuple(live))
        weights = tuple(1.0 + 0.3 * stage for stage in range(pipe * chunks))
        work = TaskGraph(schedule.placement, number, weights=weights)
        peaks = [
            max(sum(weights[s] * n for s, n in zip(stages, x, strict=True)) for x in moments)
            for stages, moments in zip(work.stages, live, strict=True)
        ]
        assert peaks == pytest.approx(work.held(work.order(schedule)))


def test_of_layouts_within_the_models_error_the_simpler_one_comes_first():
    run, ranks = run_of(*_CASE)
    found = search(run, ranks, H100, number=3).found
    plain, tied = (
        replace(x, choice=y) for x, y in zip(found, (LayoutChoice(), LayoutChoice(2)), strict=False)
    )
    slow = replace(plain, time=replace(plain.time, step=SlowerStep(plain.time.step.terms, 2.0)))
    assert simpler_first([tied, plain], H100)[0].choice == LayoutChoice()
    assert simpler_first([tied, slow], H100)[0].choice == LayoutChoice(2)


class SlowerStep:
    """A step that takes `times` as long."""

    def __init__(self, terms, times):
        self.total = times * sum(terms.values())


FILE = (DENSE + REST).format(layers=2, batch=4, gb=2.0, weights="float32", compiled="off")


def test_the_command_prints_the_layouts_and_writes_one(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(FILE + "parallel: {tensor: 3}\n")  # which 2 ranks do not allow
    options = [str(path), "--search", "--world", "2", "--device", "h100-sxm", "--apply", "1"]
    assert main(["plan", *options]) == 0
    text = capsys.readouterr().out
    assert "TOKENS/S" in text and "# 10\nparallel: {data: " in text
    written = load(tmp_path / "run-layout1.yaml", world_size=2)
    (best,) = search(loads(FILE, "", LayoutChoice.overrides()), 2, H100, number=1).found
    assert make_plan(written, 2).world_size == 2
    assert run_time(make_plan(written, 2), H100).step.total <= best.time.step.total * 1.05
    assert main(["plan", *options]) == 2
    assert "run-layout1.yaml exists; move it away first" in capsys.readouterr().err


def test_a_search_says_what_would_fit(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(FILE.replace("vocab: 4096", "vocab: 400000").replace("gb: 2.0", "gb: 3.7"))
    assert main(["plan", str(path), "--search", "--world", "1", "--device", "h100-sxm"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert "no layout of 1 ranks fits in the 3.7 GB" in text and " ranks would do" in text


def test_a_search_needs_a_device_and_apply_a_search(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    assert main(["plan", str(path), "--search"]) == 2
    assert "--search needs a device: pass --device NAME" in capsys.readouterr().err
    assert main(["plan", str(path), "--apply", "1"]) == 2
    assert "goes with --search" in capsys.readouterr().err


def test_the_queue_says_when_a_run_would_be_done(tmp_path, monkeypatch, capsys):
    answers = {"sinfo": "n1|gpu*|idle\nn2|gpu*|alloc", "squeue": ""}
    for name, text in answers.items():
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '%s\\n' '{text}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    path = tmp_path / "run.yaml"
    path.write_text(FILE + "launch: {slurm: {nodes: 1, gpus-per-node: h100:1, partition: gpu}}\n")
    assert main(["plan", str(path), "--search", "--queue"]) == 0
    text = capsys.readouterr().out
    assert "1 of 2 idle" in text and "not free within what Slurm says" in text
    assert "partition gpu has 2 nodes" in text and "done first on 1 nodes" in text
    assert main(["plan", str(path), "--queue"]) == 2
    assert "goes with --search" in capsys.readouterr().err
