"""The search finds the layouts that a prediction of every layout would find."""

import itertools
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.tells import tells
from torchdistpackage.cli._search import simpler_first
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load, loads
from torchdistpackage.errors import ConfigError, ScheduleError
from torchdistpackage.plan.elastic import fitted
from torchdistpackage.plan.layout_search import memory_limit, peak_bytes, search
from torchdistpackage.plan.layout_space import SCHEDULES, LayoutChoice, all_layouts, is_published
from torchdistpackage.plan.memory_bounds import MemoryBounds, base_plan
from torchdistpackage.plan.order_peaks import ONE_BACKWARD, live_of, placement_of
from torchdistpackage.plan.refusals import refuse_here
from torchdistpackage.plan.run_plan import make_plan, splits_backward
from torchdistpackage.plan.step_time import run_time
from torchdistpackage.predict.devices import DEVICES
from torchdistpackage.schedule.actions import flatten
from torchdistpackage.schedule.engine import BACKWARD, FORWARD, INPUT, WEIGHT, TaskGraph
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


def by_force(run, ranks, node):
    """Seconds of every layout that may run and fits in its best order of ranks, ascending, with the
    number of keys that it changes."""
    best: dict[LayoutChoice, tuple[float, int]] = {}
    for choice in all_layouts(run, ranks, node):
        try:
            plan = make_plan(choice.of(run, ranks), ranks, ranks_per_node=node)
        except (ConfigError, ScheduleError):
            continue
        if peak_bytes(plan, H100) <= memory_limit(run, H100):
            seconds = run_time(plan, H100, node).step.total, choice.complexity
            key = replace(choice, order=())
            best[key] = min(best.get(key, seconds), seconds)
    return sorted(best.values())


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
    expected = by_force(run, ranks, 2)
    result = search(run, ranks, H100, ranks_per_node=2, error=0.1)
    seconds = [x.time.step.total for x in result.found]
    assert seconds == pytest.approx([x for x, _ in expected[:10]], rel=1e-12)
    assert all(x.peak_bytes <= result.limit_bytes for x in result.found)
    if expected:
        fewest = min(keys for x, keys in expected if x <= 1.1 * expected[0][0])
        assert result.simplest.choice.complexity == fewest
    if case is _CASE:
        assert result.found and result.least_bytes > result.limit_bytes  # some did not fit


@pytest.mark.parametrize("case", [_CASE, *(pytest.param(x, marks=pytest.mark.full) for x in _MORE)])
def test_no_layout_needs_less_memory_than_its_bound(case):
    run, ranks = run_of(*case)
    bounds = MemoryBounds(run, ranks, base_plan(run, 2), on_gpu=True)
    choices = list(all_layouts(run, ranks, 2))
    for choice in random.Random(0).sample(choices, 40):
        try:
            plan = make_plan(choice.of(run, ranks), ranks, ranks_per_node=2, messages=False)
        except (ConfigError, ScheduleError):
            continue
        peak = peak_bytes(plan, H100)
        assert bounds.least_mean(choice) <= bounds.least_peak(choice) * (1 + 1e-9)
        assert 0.8 * peak <= bounds.least_peak(choice) <= peak * (1 + 1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_bounds_know_which_schedules_split_their_backward(name):
    chunks = 2 if name in TWO_CHUNKS else 1
    programs = [GENERATORS[name](*x, chunks).programs for x in ((2, 1), (2, 4), (4, 2), (3, 8))]
    assert {splits_backward(x) for x in programs} == {name not in ONE_BACKWARD}


@pytest.mark.parametrize("name", SCHEDULES)
def test_bounds_know_where_stages_are_and_what_ranks_hold(name):
    for pipe, number, chunks in itertools.product((2, 3, 4, 8), (1, 3, 4, 7, 8, 16, 24), (2, 3)):
        chunks = chunks if name == "interleaved" else 1 + (name in TWO_CHUNKS)
        schedule = GENERATORS[name](pipe, number, chunks)
        assert is_published(name, pipe, number) == ("~" not in schedule.name)
        if not is_published(name, pipe, number):
            continue
        assert placement_of(name, pipe, chunks) == schedule.placement
        work = TaskGraph(schedule.placement, number)
        programs = zip(work.stages, work.order(schedule), strict=True)
        for moments, (stages, program) in zip(
            live_of(name, pipe, number, chunks), programs, strict=True
        ):
            held = set(before_backwards(work, stages, program))
            assert all(any(is_within(x, y) for y in held) for x in moments)
            if name != "interleaved-zb":  # whose moments differ from the one that is known
                most = max(sum(x[: len(stages)]) for x in held)
                assert max(sum(x[: len(stages)]) for x in moments) == most


def before_backwards(work, stages, program):
    """Micro-batches of each stage before each backward of a rank: those that wait for it, and those
    whose weights have no gradients yet."""
    waiting, deferred = dict.fromkeys(stages, 0), dict.fromkeys(stages, 0)
    for number in program:
        kind, stage = number // work.size, number % work.size // work.num_microbatches
        if kind in (INPUT, BACKWARD):
            yield (*waiting.values(), *deferred.values())
        waiting[stage] += (kind == FORWARD) - (kind in (INPUT, BACKWARD))
        deferred[stage] += (kind == INPUT) - (kind == WEIGHT)


def is_within(one, other):
    return all(x <= y for x, y in zip(one, other, strict=True))


def test_of_layouts_within_the_models_error_the_simpler_one_comes_first():
    run, ranks = run_of(*_CASE)
    result = search(run, ranks, H100, number=3, error=0.1)
    found = result.found
    first, *others = simpler_first(result, H100)
    assert first is result.simplest and len(others) == len(found) - 1
    plain, tied = (
        replace(x, choice=y) for x, y in zip(found, (LayoutChoice(), LayoutChoice(2)), strict=False)
    )
    slow = replace(plain, time=replace(plain.time, step=SlowerStep(plain.time.step.terms, 2.0)))
    best = replace(result, found=(first, slow, tied, plain))
    assert simpler_first(best, H100)[1].choice == LayoutChoice()
    assert simpler_first(best, H100)[-1] is slow


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


def test_a_run_takes_each_of_the_printed_layouts(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    options = ["--search", "--world", "4", "--ranks-per-node", "2", "--device", "h100-sxm"]
    assert main(["plan", str(path), *options]) == 0
    blocks = capsys.readouterr().out.split("\n# ")[1:]
    assert len(blocks) == 10
    for block in blocks:
        sections = yaml.safe_load(block.partition("\n")[2])
        keys = [
            f"{section}.{key}={json.dumps(value)}"
            for section, values in sections.items()
            for key, value in values.items()
        ]
        # as train/job.py does, in this order
        config = load(path, keys, world_size=4)
        plan = make_plan(fitted(config, 4), 4, str(path))
        refuse_here(config, str(path), str(tmp_path))
        assert plan.world_size == 4 and any(x.kind.is_message for x in actions(plan)) == (
            plan.config.parallel.pipe > 1
        )


def actions(plan):
    return [x for program in plan.schedule.programs for x in flatten(program)]


def test_a_search_says_what_would_fit(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(FILE.replace("vocab: 4096", "vocab: 400000").replace("gb: 2.0", "gb: 3.7"))
    assert main(["plan", str(path), "--search", "--world", "1", "--device", "h100-sxm"]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert tells(text, "1 ranks", "3.7 GB") and " ranks would do" in text


def test_a_search_needs_a_device_and_apply_a_search(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(FILE)
    assert main(["plan", str(path), "--search"]) == 2
    assert tells(capsys.readouterr().err, "--search", "--device", "NAME")
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
    assert "1 of 2 idle" in text and "Slurm expects too few nodes to be free" in text
    assert "partition gpu has 2 nodes" in text and "finished first on 1 nodes" in text
    assert main(["plan", str(path), "--queue"]) == 2
    assert "goes with --search" in capsys.readouterr().err


LLAMA = (
    "model: {{layers: {layers}, dim: {dim}, heads: {heads}, kv_heads: 8, mlp: swiglu, norm: rms, "
    "mlp_hidden: {hidden}, vocab: 128256, tied: false}}\n"
    "data: {{seq_len: 8192, global_batch: {batch}}}\nprecision: {{dtype: bf16}}\n"
)
LLAMA_70B = LLAMA.format(layers=80, dim=8192, heads=64, hidden=28672, batch=128)
LLAMA_405B = LLAMA.format(layers=126, dim=16384, heads=128, hidden=53248, batch=2048)
MIXTURE = (
    "model: {layers: 61, dim: 7168, heads: 128, mlp: swiglu, norm: rms, vocab: 129280, "
    "tied: false, moe: {num_experts: 256, top_k: 8, hidden: 2048}}\n"
    "data: {seq_len: 4096, global_batch: 15360}\nprecision: {dtype: bf16}\n"
)
SHARDED = LayoutChoice(context=2, accumulate=4, zero=3)
DEEP = LayoutChoice(
    8, 16, sequence_parallel=True, microbatches=32, schedule="interleaved", chunks=8, zero=2
)
WIDE = LayoutChoice(pipe=16, expert=16, microbatches=960, schedule="dualpipe-v", chunks=2, zero=1)
PAGE = Path(__file__).parents[2] / "docs/which_layout.md"


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "ranks", "published"),
    [(LLAMA_70B, 64, SHARDED), (LLAMA_405B, 8192, DEEP), (MIXTURE, 256, WIDE)],
)
def test_the_page_compares_published_layouts_with_the_best(text, ranks, published):
    run = loads(text, "published", LayoutChoice.overrides())
    (best,) = search(run, ranks, H100, ranks_per_node=8, number=1).found
    for recompute in ("none", "blocks"):
        choice = replace(published, recompute=recompute)
        plan = make_plan(choice.of(run, ranks), ranks, ranks_per_node=8, messages=False)
        seconds, best_s = run_time(plan, H100, 8).step.total, best.time.step.total
        gib = peak_bytes(plan, H100) / 2**30
        row = f"| {recompute} | {seconds:.1f} s | {gib:.0f} GiB | {best_s:.1f} s | "
        assert row + f"{seconds / best_s:.2f} |" in PAGE.read_text()
