"""Runs of earlier versions are gone on with and evaluated by this one, with their numbers."""

import json
import shutil
from pathlib import Path

import pytest

from tests.train.stored_run import CONFIG, EXPECTED, SAVED, STEPS, STORED
from torchdistpackage.report.run import Run

VERSIONS = sorted(path.name for path in STORED.iterdir())
NUMBERS = ("loss", "grad_norm", "lr", "val_loss")


@pytest.fixture
def expected(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """What the version itself did, its folder being the current one."""
    shutil.copytree(STORED / request.param, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run.yaml").write_text(CONFIG, "utf-8")
    monkeypatch.chdir(tmp_path)
    return json.loads(Path(EXPECTED).read_text("utf-8"))


def rows_of(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text("utf-8").splitlines()]


def numbers(rows: list[dict]) -> dict[tuple[int, str], float]:
    return {(x["step"], name): x[name] for x in rows for name in NUMBERS if name in x}


@pytest.mark.parametrize("expected", VERSIONS, indirect=True)
def test_a_run_of_an_earlier_version_goes_on_with_its_own_numbers(expected: dict, tdp):
    run = Path("run")
    assert [save.step for save in Run(run).saves] == [SAVED]
    code, text = tdp(["eval", "run", "--json"])
    assert code == 0, text
    told = json.loads(text)
    assert told["loss"] == pytest.approx(expected["eval"]["loss"], rel=1e-12)
    assert told["tokens"] == expected["eval"]["tokens"]
    code, text = tdp(["train", "run.yaml"])
    assert code == 0, text
    starts = [x["step"] for x in rows_of(run, "events.jsonl") if x["event"] == "start"]
    assert starts == [0, SAVED]
    rows, truth = numbers(rows_of(run)), numbers(expected["rows"])
    assert {step for step, _ in rows} == {*range(1, STEPS + 1)}
    assert rows == pytest.approx(truth, rel=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("expected", VERSIONS, indirect=True)
@pytest.mark.parametrize("layout", ["parallel.data=1 parallel.tensor=1 parallel.zero=0"])
def test_a_run_of_an_earlier_version_goes_on_on_another_layout(layout, expected: dict, tdp):
    code, text = tdp(["train", "run.yaml", *layout.split()])
    assert code == 0, text
    events = rows_of(Path("run"), "events.jsonl")
    assert [x["step"] for x in events if x["event"] == "start"] == [0, SAVED]
    rows = numbers(rows_of(Path("run")))
    assert rows == pytest.approx(numbers(expected["rows"]), rel=1e-9)
