"""The page on your own code: its files train as they stand there, on every layout alike."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.full
def test_the_digits_of_the_page_train_alike_on_two_layouts(tmp_path: Path):
    page = PAGE.read_text(encoding="utf-8")
    for name in ("digits.py", "digits.yaml"):
        found = re.search(rf"`{re.escape(name)}`:\n\n```\w+\n(.*?)```", page, re.DOTALL)
        assert found, f"{PAGE} shows no {name}"
        (tmp_path / name).write_text(found[1], encoding="utf-8")
    four = losses(tmp_path, "four")
    one = losses(tmp_path, "one", "parallel.data=1", "parallel.pipe=1")
    assert len(four) == STEPS
    assert one == pytest.approx(four, abs=1e-4)  # float32, summed in another order
    assert four[-1] < 0.8 * four[0]
