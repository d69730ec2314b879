"""A run with `data.streaming` that ended and went on is the one that did not end."""

import json
from pathlib import Path

from tests.data.texts import save_lines, save_tokenizer, sentences

BLOCK = 8 << 20
COMPARED = ("step", "loss", "val_loss", "grad_norm", "lr", "tokens")


def blocks(folder: Path, number: int) -> Path:
    """Lines that fill blocks by a key that nothing reads, as only a text takes time."""
    rows = [{"text": text, "unread": "x" * (BLOCK // 8)} for text in sentences(8 * number)]
    return save_lines(folder / "train.jsonl", rows)


def test_a_resumed_run_has_the_rows_of_an_unbroken_one(tdp, tmp_path):
    val = save_lines(tmp_path / "val.jsonl", [{"text": text} for text in sentences(6, seed=1)])
    (tmp_path / "run.yaml").write_text("run: {name: r}")
    words = ["train", str(tmp_path / "run.yaml"), "parallel.data=2", "parallel.zero=2"]
    words += [f"data.path={blocks(tmp_path, 3)}", "data.name=jsonl", f"data.val_path={val}"]
    words += [f"data.tokenizer={save_tokenizer(tmp_path / 't')}", "data.streaming=true"]
    words += ["model.layers=1", "model.dim=16", "model.heads=2", "model.vocab=300"]
    words += ["data.seq_len=16", "data.global_batch=8", "pipeline.microbatches=1"]
    words += ["optim.schedule=constant", "train.eval_every=2", "train.eval_batches=1"]
    words += ["checkpoint.save_every=100", "train.generate_tokens=0", "log.plot=false"]

    def rows(name: str, *steps: int) -> list[dict]:
        folder = tmp_path / name
        for number in steps:
            code, said = tdp([*words, f"run.dir={folder}", f"train.steps={number}"])
            assert code == 0, said
        lines = (folder / "r" / "metrics.jsonl").read_text().splitlines()
        return [{key: x[key] for key in COMPARED if key in x} for x in map(json.loads, lines)]

    unbroken = rows("unbroken", 8)
    assert rows("broken", 4, 8) == unbroken and len(unbroken) == 8
    assert all({*COMPARED} - {"val_loss"} <= row.keys() for row in unbroken), unbroken[0].keys()
    entries = [x for x in (tmp_path / "unbroken" / "tokens").iterdir() if x.is_dir()]
    assert len(entries) == 3 + 1  # blocks, and data.val_path
