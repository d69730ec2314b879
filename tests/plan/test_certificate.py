"""What a certificate of `tdp prove` holds for, and what makes it void."""

import json
from pathlib import Path

import pytest

from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load, loads
from torchdistpackage.plan import certificate as module
from torchdistpackage.plan.certificate import (
    certificate,
    certificate_path,
    proof_of,
    read_certificate,
    unproved,
)


def config(folder: Path, *words: str, data: int = 2):
    return loads("{}", overrides=[f"run.dir={folder}", f"parallel.data={data}", *words])


def reasons(run, planned=None) -> str:
    return "; ".join(x.text for x in unproved(run, planned or run, "run.yaml"))


def test_a_certificate_holds_for_any_number_of_ranks_along_its_axes(tmp_path: Path):
    run = config(tmp_path)
    assert "there is no" in reasons(run) and proof_of(run, run) is None
    certificate(run, [{"data": 2}]).write(certificate_path(run))
    assert read_certificate(certificate_path(run)) == certificate(run, [{"data": 2}])
    larger = config(tmp_path, "run.name=other", "log.every=7", "train.eval_every=9", data=4)
    assert proof_of(larger, larger) == str(certificate_path(run))
    split = config(tmp_path, "parallel.tensor=2")
    assert "data and tensor" in reasons(split)
    changed = config(tmp_path, "optim.clip=0.5")
    assert "there is no" in reasons(changed)
    certificate(split, [{"tensor": 2}]).write(certificate_path(run))
    assert read_certificate(certificate_path(run)).layouts == [{"data": 2}, {"tensor": 2}]


def test_other_versions_and_other_code_void_it(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def build(): ...\n")
    run = config(tmp_path, "model.target=mine:build", "data.target=mine:build", "model.name=null")
    certificate(run, [{"data": 2}]).write(certificate_path(run))
    assert reasons(run) == ""
    (tmp_path / "mine.py").write_text("def build(): pass\n")
    assert "your own modules have changed" in reasons(run)
    (tmp_path / "mine.py").write_text("def build(): ...\n")
    monkeypatch.setattr(module, "version", lambda name: "0.0.1")
    assert "torch" in reasons(run) and "0.0.1" in reasons(run)
    assert certificate(run, [{"pipe": 2}]).layouts == [{"pipe": 2}]


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 9}', json.dumps({"format": 1})])
def test_a_broken_certificate_is_named(tmp_path: Path, text: str):
    run = config(tmp_path)
    path = certificate_path(run)
    path.parent.mkdir()
    path.write_text(text)
    assert "cannot be read" in reasons(run)


def test_a_run_without_one_is_not_submitted(tmp_path: Path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{dir: {tmp_path}/runs}}\nparallel: {{data: 2}}\n")
    assert main(["submit", str(file), "--proved", "--dry-run"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "is not proved" in said and f"tdp prove {file} --layouts this" in said
    assert main(["submit", str(file), "optim.lr=1", "--proved", "--dry-run"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"tdp prove {file} optim.lr=1 --layouts this" in said
    certificate(load(str(file), []), [{"data": 2}]).write(certificate_path(load(str(file), [])))
    assert main(["submit", str(file), "--proved", "--dry-run"]) == 0
    assert main(["submit", str(file), "optim.lr=1", "--proved", "--dry-run"]) == 2


@pytest.mark.full
def test_a_run_notes_the_certificate_that_holds_for_it(tmp_path: Path):
    words = ["data.seq_len=16", "model.layers=1", "model.dim=16", "model.heads=2", "train.steps=1"]
    words += ["data.global_batch=8", "checkpoint.save_every=0", "launch.local.procs=2"]
    file = tmp_path / "run.yaml"
    file.write_text(f"run: {{dir: {tmp_path}/runs, name: one}}\nparallel: {{data: 2}}\n")
    run = load(str(file), words)
    certificate(run, [{"data": 2}]).write(certificate_path(run))
    assert main(["train", str(file), *words]) == 0
    rows = (tmp_path / "runs" / "one" / "events.jsonl").read_text().splitlines()
    (start,) = (row for row in map(json.loads, rows) if row["event"] == "start")
    assert start["proof"] == str(certificate_path(run))
