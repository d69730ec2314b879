"""Sets to evaluate on by name: each token once, the same on every layout and in tdp eval."""

import json
import math
from pathlib import Path

import pytest

from tests.data.texts import save_lines, save_tokenizer, sentences
from tests.train import parity
from torchdistpackage.checkpoint.commit import candidates
from torchdistpackage.checkpoint.manifest import read_manifest

RUN = [
    *("model.layers=2", "model.dim=16", "model.heads=2", "model.vocab=300", "data.seq_len=16"),
    *("data.global_batch=8", "pipeline.microbatches=2", "train.steps=4", "optim.warmup_steps=1"),
    *("train.eval_batches=40", "precision.dtype=float64"),
]


def files(folder: Path) -> list[str]:
    for seed, (name, number) in enumerate({"train": 60, "val": 9, "web": 7, "few": 1}.items()):
        texts = sentences(number, seed)
        save_lines(folder / f"{name}.jsonl", [{"text": text} for text in texts])
    return [
        f"data.path={folder}/train.jsonl",
        "data.name=jsonl",
        f"data.val_path={folder}/val.jsonl",
        f"data.eval={{web: {folder}/web.jsonl, few: {folder}/few.jsonl, same: {folder}/val.jsonl}}",
        f"data.tokenizer={save_tokenizer(folder / 't')}",
        f"data.cache={folder}/cache",
    ]


def evaluated(overrides: list[str]) -> tuple[float | None, dict[str, float] | None, int]:
    """Validation, sets, and windows of the validation file."""
    run = parity.trainer([*RUN, *overrides])
    number = run.data.val.num_samples["val"]
    found = run.evaluate(), run.evaluate_sets(), number
    run.close()
    return found


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.data=2", "parallel.context=2"],
        pytest.param(["parallel.pipe=2", "parallel.tensor=2"], marks=pytest.mark.full),
        pytest.param(["parallel.data=4", "pipeline.microbatches=1"], marks=pytest.mark.full),
    ],
    ids=" ".join,
)
def test_sets_are_evaluated_alike_on_every_layout(ranks, tmp_path, layout):
    where = files(tmp_path)
    ((_, one, number),) = ranks(1).run(evaluated, where)
    assert one.keys() == {"web", "few", "same"} and len({*one.values()}) == 3
    for _, sets, _ in ranks(4).run(evaluated, [*where, *layout]):
        assert sets == pytest.approx(one, rel=1e-9)
    # a validation reads the file in batches of samples, a set in windows: of equally many the same
    batch = [f"data.global_batch={number}", "train.eval_batches=1", "pipeline.microbatches=1"]
    ((loss, sets, _),) = ranks(1).run(evaluated, [*where, *batch])
    assert loss == pytest.approx(sets["same"], rel=1e-12) == pytest.approx(one["same"], rel=1e-9)


def test_a_run_logs_each_set_keeps_the_best_and_tdp_eval_agrees(tdp, tmp_path):
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/runs, name: r}}")
    words = [
        "train",
        str(tmp_path / "run.yaml"),
        *RUN,
        *files(tmp_path),
        "log.plot=false",
        "log.report=false",
    ]
    words += ["train.eval_every=2", "checkpoint.save_every=2", "checkpoint.keep_best=web"]
    code, said = tdp([*words, "parallel.data=2", "checkpoint.keep_last=1", "optim.lr=0.01"])
    assert code == 0, said
    run = tmp_path / "runs" / "r"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert ["eval_loss" in row for row in rows] == [False, True, False, True]
    last = rows[-1]
    assert last["perplexity"] == pytest.approx(
        {name: math.exp(x) for name, x in {**last["eval_loss"], "val": last["val_loss"]}.items()}
    )
    assert f"evaluated, loss (perplexity): val {last['val_loss']:.4f} (" in said
    assert f"web {last['eval_loss']['web']:.4f} ({last['perplexity']['web']:.4g})" in said
    kept = {x.step: x.facts for x in map(read_manifest, candidates(run / "checkpoints"))}
    assert kept[4]["val_loss/web"] == last["eval_loss"]["web"]
    best = min(rows[1::2], key=lambda row: row["eval_loss"]["web"])["step"]
    assert kept.keys() == {4, best}
    code, said = tdp(["eval", str(run), "--json"])
    found = json.loads(said.splitlines()[-1])
    assert code == 0 and found["sets"].keys() == {"web", "few", "same"}
    for name, values in found["sets"].items():
        assert values["loss"] == pytest.approx(last["eval_loss"][name], rel=1e-9)
    assert found["loss"] == pytest.approx(found["sets"]["same"]["loss"], rel=1e-12)
    code, said = tdp(["eval", str(run)])
    assert code == 0 and "of web, step 4" in said.replace("\n ", "") and "of few" in said


def test_sets_that_are_missing_or_wrong_are_named_before_ranks_start(tdp, tmp_path):
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/runs, name: r}}")
    where = files(tmp_path)
    (tmp_path / "web.jsonl").unlink()
    (tmp_path / "val.jsonl").write_text('{"text": 3}\n')
    words = ["train", str(tmp_path / "run.yaml"), *RUN, *where]
    code, said = tdp(words)
    assert code == 2 and "data.eval.web" in said and "web.jsonl does not exist" in said
    (tmp_path / "web.jsonl").write_text("")
    code, said = tdp(words)
    assert code == 2 and "web.jsonl holds no token" in said and "val.jsonl:1: field 'text'" in said
