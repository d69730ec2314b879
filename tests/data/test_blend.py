"""Blends of sources: exact shares, and the same samples in every layout and after a resume."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.texts import json_lines, pairs, save_lines, save_tokenizer, sentences
from tests.tells import tells
from tests.train import parity
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.load import loads
from torchdistpackage.data.blend import BlendedDataset, BlendOrder, BlendPart
from torchdistpackage.data.packing import PackedDataset
from torchdistpackage.data.source import DataSource, TokenDataset
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.token_cache import tokenized

WEIGHTS = ([1.0], [1, 1], [3, 0, 1], [0.7, 0.2, 0.05, 0.05], [1e-3, 5, 1e3], [0.1] * 7)


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_counts_are_those_of_the_samples_one_by_one(weights):
    order, counts = BlendOrder(weights, seed=3), [0] * len(weights)
    for number in range(700):
        assert order.counts(number) == counts
        counts[order.source(number)] += 1


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_each_source_has_its_part_within_a_few_samples_however_many_there_were(weights):
    order, total = BlendOrder(weights, seed=3), sum(weights)
    for number in (1, 10, 1000, 12345, 10**6, 10**9):
        for count, weight in zip(order.counts(number), weights, strict=True):
            assert abs(count - number * weight / total) < 5
    assert BlendOrder(weights, seed=4).counts(10**9) != order.counts(10**9) or len(weights) == 1


def parts_of(folder: Path) -> list[BlendPart]:
    """Return a blend of texts, pairs and ids with weights 5, 3 and 2."""
    (folder / "pairs").mkdir(exist_ok=True)
    cache, options = folder / "cache", {"vocab": 300, "seq_len": 16, "global_batch": 8}
    one = PackedDataset(
        tokenized(json_lines(folder, sentences(40)), cache), val_fraction=0.2, **options
    )
    rows = [(" ".join(t.split()[:2]), t) for t in sentences(30, seed=1)]
    two = PackedDataset(
        tokenized(pairs(folder / "pairs", rows), cache), val_fraction=0.2, **options
    )
    ids = np.random.default_rng(0).integers(0, 300, 2000).astype(np.uint16)
    three = TokenDataset(ids[:1500], ids[1500:], 300, 16, num_val=20, global_batch=8)
    found = ("texts", 5.0, one), ("pairs", 3.0, two), ("ids", 2.0, three)
    return [BlendPart(*x, x[2].num_samples["train"]) for x in found]


def test_every_sample_is_the_next_of_its_source(tmp_path):
    """Check that each pass over a source has all of its samples once, in a new order."""
    parts = parts_of(tmp_path)
    data, order, seen = BlendedDataset(parts, 8), BlendOrder([5, 3, 2], 7), [0, 0, 0]
    for step in range(1, 60):
        ids, targets = data.batch("train", 7, step, 0, 1, 8)
        before = list(seen)
        for row in range(8):
            source = order.source((step - 1) * 8 + row)
            want = _sample(parts[source].data, source, seen[source])
            assert torch.equal(ids[row], want[0][0]) and torch.equal(targets[row], want[1][0])
            seen[source] += 1
        shares = data.shares(7, step)
        drawn = [(now - was) / 8 for was, now in zip(before, seen, strict=True)]
        assert list(shares) == ["texts", "pairs", "ids"] and list(shares.values()) == drawn
    passes = data.epochs(7, 59)
    assert passes == {p.label: n / p.num_samples for p, n in zip(parts, seen, strict=True)}
    assert passes["pairs"] > 1.5, "a second pass was seen"


def _sample(data: DataSource, source: int, number: int):
    from torchdistpackage.comm.random import seed_from

    return data.batch("train", seed_from("source", 7, source), 1, 0, 1, 1, first=number)


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_layout_sees_the_same_samples(tmp_path, split):
    data = BlendedDataset(parts_of(tmp_path), 8)
    assert isinstance(data, DataSource)
    for step in (1, 2, 30):
        whole = data.batch(split, 3, step, 0, 1, 8)
        fresh = BlendedDataset(parts_of(tmp_path), 8)  # resumed at that step
        # a validation has no rounds
        for num_data, rounds in ((2, 1), (4, 1), *[(2, 2)] * (split == "train")):
            per_rank = 8 // num_data // rounds
            found = [
                fresh.batch(split, 3, step, d, num_data, per_rank, first=r * num_data * per_rank)
                for r in range(rounds)
                for d in range(num_data)
            ]
            for one, of in zip(whole, zip(*found, strict=True), strict=True):
                assert torch.equal(torch.cat(of), one)


def corpus(folder: Path) -> list[str]:
    """Return overrides for a large source of texts, a small source of pairs, and a tokenizer."""
    save_lines(folder / "web.jsonl", [{"text": text} for text in sentences(60)])
    rows = [{"prompt": t[:9], "completion": t} for t in sentences(30, seed=1)]
    save_lines(folder / "tasks.jsonl", rows)
    sources = [
        {"path": f"{folder}/web.jsonl", "weight": 3},
        {"path": f"{folder}/tasks.jsonl", "field": "prompt+completion"},
    ]
    return [
        f"data.sources={json.dumps(sources)}",
        f"data.tokenizer={save_tokenizer(folder / 't')}",
        f"data.cache={folder}/cache",
    ]


RUN = [
    *("model.layers=2", "model.dim=16", "model.heads=2", "model.vocab=300", "data.seq_len=16"),
    *("data.global_batch=8", "pipeline.microbatches=2", "train.steps=4", "optim.warmup_steps=1"),
    *("train.eval_batches=1", "precision.dtype=float64", "data.document_masks=true"),
]


def trained(overrides: list[str]) -> list[float]:
    run = parity.trainer([*RUN, *overrides])
    losses = [run.train_step(step).wait().loss for step in (1, 2, 3)]
    losses.append(run.evaluate() or 0.0)
    run.close()
    return losses


LAYOUTS = {
    "data2 x context2": ["parallel.data=2", "parallel.context=2", "parallel.zero=1"],
    "data2, accumulated": ["parallel.data=2", "train.accumulate=2"],
    "pipe2 x tensor2": ["parallel.pipe=2", "parallel.tensor=2"],
}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [n if not i else pytest.param(n, marks=pytest.mark.full) for i, n in enumerate(LAYOUTS)],
)
def test_a_run_on_sources_trains_alike_on_every_layout(ranks, tmp_path, layout):
    where, changes = corpus(tmp_path), LAYOUTS[layout]
    (one,) = ranks(1).run(trained, where)
    world = 2 if "accumulate" in changes[-1] else 4
    if world == 2:
        changes = [*changes, "pipeline.microbatches=1"]
        (one,) = ranks(1).run(trained, [*where, "train.accumulate=2", "pipeline.microbatches=2"])
    for losses in ranks(world).run(trained, [*where, *changes]):
        assert losses == pytest.approx(one, rel=1e-9)


@pytest.mark.full
def test_a_resumed_run_goes_on_and_says_that_a_source_was_edited(tdp, tmp_path):
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/runs}}")
    words = ["train", str(tmp_path / "run.yaml"), *RUN, *corpus(tmp_path), "parallel.data=2"]
    words += ["log.every=1", "log.plot=false", "train.straggler_every=0", "train.eval_every=0"]
    words = [*words, "optim.schedule=constant", "checkpoint.save_every=3"]
    words.remove("train.steps=4")
    code, said = tdp([*words, "run.name=whole", "train.steps=6"])
    assert code == 0, said
    shown = [line for line in said.splitlines() if line.startswith("step ")]
    assert len(shown) == 6 and all("  web " in line and "%  tasks " in line for line in shown)
    rows = _rows(tmp_path / "runs" / "whole")
    assert sum(row["sources"]["web"] for row in rows) / 6 == pytest.approx(0.75, abs=0.05)
    half = [*words, "run.name=half"]
    assert tdp([*half, "train.steps=3"])[0] == 0
    code, said = tdp([*half, "train.steps=6"])
    assert code == 0 and "resumed after step 3" in said and "has other contents" not in said
    kept = ("loss", "grad_norm", "sources", "epochs")
    assert [[r[k] for k in kept] for r in _rows(tmp_path / "runs" / "half")] == [
        [r[k] for k in kept] for r in rows
    ]
    with (tmp_path / "tasks.jsonl").open("a") as file:
        file.write('{"prompt": "new", "completion": "one more"}\n')
    code, said = tdp([*half, "train.steps=7"])
    assert code == 0 and tells(said, "tasks.jsonl", "step 6")


def _rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_sources_that_do_not_do_are_named_before_ranks_start(tdp, tmp_path):
    (tmp_path / "run.yaml").write_text("")
    found = corpus(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "broken.jsonl").write_text('{"text": 5}\n')
    names = ("web.jsonl", "gone.jsonl", "empty.jsonl", "nothing", "broken.jsonl")
    sources = [{"path": f"{tmp_path}/{name}"} for name in names]
    words = ["train", str(tmp_path / "run.yaml"), *RUN, f"run.dir={tmp_path}", *found[1:]]
    code, said = tdp([*words, f"data.sources={json.dumps(sources)}"])
    assert code == 2 and "data.sources[1].path" in said and "gone.jsonl does not exist" in said
    del sources[1]
    sources[2]["name"] = "jsonl"
    code, said = tdp([*words, f"data.sources={json.dumps(sources)}"])
    assert code == 2 and "3 problems" in said
    for text in ("empty.jsonl holds no token", "has no .jsonl file", "broken.jsonl:1: field"):
        assert text in said


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ("{path: a, weight: -1}", "data.sources[1].weight: wants a number, 0 or more, got the num"),
        ("{path: a, weight: .nan}", "data.sources[1].weight: wants a number, 0 or more"),
        ("{path: a, wieght: 1}", "data.sources[1].wieght: unknown key; did you mean weight?"),
        ("{path: [5]}", "data.sources[1].path: wants a path"),
        ("{weight: 1}", "data.sources: data.sources[1] has no path"),
        ("word", "data.sources: wants a list of mappings with path, weight, name, field, label"),
    ],
)
def test_a_wrong_source_is_named_with_its_number_and_line(item, text):
    with pytest.raises(ConfigErrors) as caught:
        loads(f"data:\n  sources:\n  - {{path: x}}\n  - {item}\n", "r.yaml")
    (problem,) = caught.value.problems
    assert text in str(problem) and str(problem).startswith("r.yaml:")


def test_tokenize_and_plan_count_each_source(tmp_path, capsys):
    from torchdistpackage.cli.main import main

    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/runs}}")
    words = [str(tmp_path / "run.yaml"), *RUN, *corpus(tmp_path)]
    assert main(["data", "tokenize", *words]) == 0
    said = capsys.readouterr().out
    assert said.startswith("web: ") and " tokens of 60 documents" in said
    assert "\ntasks: " in said and " tokens of 30 documents" in said
    assert main(["plan", *words]) == 0
    assert "2 sources: web 75.0%, tasks 25.0%" in capsys.readouterr().out
    assert main(["plan", *words, "--all"]) == 0
    said = capsys.readouterr().out
    assert tells(said, "32 samples", "4 steps", "2 sources")
    assert [x.split()[:3] for x in said.splitlines() if x.startswith(("web", "tasks"))] == [
        ["web", "24", "75.0%"],
        ["tasks", "8", "25.0%"],
    ]


def test_a_run_of_epochs_has_the_steps_that_they_take(tdp, tmp_path):
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/runs, name: r}}")
    words = [str(tmp_path / "run.yaml"), *RUN, *corpus(tmp_path), "train.epochs=0.5"]
    words += ["train.eval_every=0", "log.plot=false", "log.report=false", "data.packing=wrapped"]
    words.remove("train.steps=4")
    code, said = tdp(["plan", *words])
    assert code == 0 and "0.5 passes over the data: samples and steps are known after" in said, said
    code, said = tdp(["train", *words, "parallel.data=2"])
    assert code == 0, said
    code, plan = tdp(["plan", *words, "--all"])
    options = {"vocab": 300, "seq_len": 16, "global_batch": 8, "val_fraction": 0.05}
    fields = {"web": "text", "tasks": "prompt+completion"}
    sources = [
        TextSource("jsonl", f"{tmp_path}/{name}.jsonl", f"{tmp_path}/t", field)
        for name, field in fields.items()
    ]
    sets = [PackedDataset(tokenized(x, tmp_path / "cache"), **options) for x in sources]
    number = sum(data.num_samples["train"] for data in sets)
    run = tmp_path / "runs" / "r"
    assert len(_rows(run)) == -(-number // 16)
    steps = len(_rows(run))
    assert f"0.5 passes over the data: {steps * 8} samples in {steps} steps of 8\n" in plan
    assert f"{steps * 8} samples in {steps} steps, of 2 sources" in plan and code == 0
    assert f"  steps: {-(-number // 16)}\n" in (run / "resolved.yaml").read_text()
    words[words.index("optim.warmup_steps=1")] = "optim.warmup_steps=5000"
    code, said = tdp(["train", *words, "run.name=late"])
    assert code == 0 and "optim.warmup_steps=5000" in said  # whose rate is never reached
