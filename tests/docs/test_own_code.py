"""The page on your own code: its files train as they stand there, on every layout alike."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchdistpackage.train.callbacks import own_callback
from torchdistpackage.train.log import StepLog
from torchdistpackage.train.metric_rows import read_metrics
from torchdistpackage.train.step_stats import StepResult

PAGE = Path(__file__).parents[2] / "docs" / "own_code.md"
STEPS = 12


def losses(folder: Path, name: str, *changes: str) -> list[float]:
    command = [sys.executable, "-m", "torchdistpackage", "train", "digits.yaml", f"run.name={name}"]
    command += [f"train.steps={STEPS}", "optim.warmup_steps=2", *changes]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def example(name: str) -> str:
    """Return the file of this name that the page shows."""
    page = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"`{re.escape(name)}`:\n\n```\w+\n(.*?)```", page, re.DOTALL)
    assert found, f"{PAGE} shows no {name}"
    return found[1]


@pytest.mark.full
def test_the_digits_of_the_page_train_alike_on_two_layouts(tmp_path: Path):
    for name in ("digits.py", "digits.yaml", "extras.py"):
        (tmp_path / name).write_text(example(name), encoding="utf-8")
    four = losses(tmp_path, "four", "log.callbacks=[extras:Smoothed]")
    one = losses(tmp_path, "one", "parallel.data=1", "parallel.pipe=1")
    assert len(four) == STEPS
    assert one == pytest.approx(four, abs=1e-4)  # float32, summed in another order
    assert four[-1] < 0.8 * four[0]
    rows = (tmp_path / "runs" / "four" / "metrics.jsonl").read_text().splitlines()
    smoothed = [json.loads(row)["smoothed_loss"] for row in rows]
    assert smoothed[0] == four[0] and smoothed[1] == pytest.approx(0.9 * four[0] + 0.1 * four[1])


def test_the_callback_of_the_page_adds_its_value_to_the_rows(tmp_path: Path, monkeypatch):
    """In this process: a rank's loop with the page's callback writes its key and its line."""
    source = example("extras.py")
    (tmp_path / "extras_of_page.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    callback = own_callback("extras_of_page:Smoothed")
    log = StepLog(tmp_path, 50, rank=0, every=50)
    loop = SimpleNamespace(log=log)
    result = StepResult(50, 2.0, 1.0, 8, 0.5, 0.1, None)
    with log.opened(0):
        callback.on_step(loop, replace(result, step=49, loss=1.0), None)
        callback.on_step(loop, result, None)
        log.write(result, 8, {})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["smoothed_loss"] == pytest.approx(1.1)
