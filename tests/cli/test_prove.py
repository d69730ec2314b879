"""`tdp prove` writes a certificate of a right run, and a program that shows a wrong one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchdistpackage.cli import prove as command
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load
from torchdistpackage.equivalence.compare import ParityFinding
from torchdistpackage.harness.parity.layouts import ParityReport
from torchdistpackage.plan.certificate import certificate_path, proof_of
from torchdistpackage.plan.parity_plan import ComparedRuns, parity_run
from torchdistpackage.plan.run_plan import Plan

SMALL = (
    "run: {{dir: {folder}/runs}}\nparallel: {{data: 2}}\nmodel: {{layers: 2, dim: 32, heads: 4}}\n"
    "data: {{seq_len: 16}}\nlaunch: {{local: {{procs: null}}}}\n"
)
WRONG = """
import torch
from torch import nn


class Wrong(nn.Module):
    def forward(self, x):
        return PLANT


def build(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Embedding(256, width), Wrong(), nn.Linear(width, 256))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(SMALL.format(folder=tmp_path))
    return path


def answered(monkeypatch: pytest.MonkeyPatch, finding: ParityFinding | None) -> list[str]:
    """Let the comparison find this; returns the layouts that it is asked for."""
    asked: list[str] = []

    def compare(plan: Plan, say: object, layouts: str) -> ParityReport:
        asked.append(layouts)
        run = parity_run(plan, "this")
        runs = [ComparedRuns(run.whole, config) for _, config in run.layouts]
        return ParityReport([({"data": 2}, finding)], runs)

    monkeypatch.setattr(command, "resolve", lambda name: compare)
    return asked


@pytest.mark.parametrize("name", ["prove", "parity"])
def test_a_right_run_gets_a_certificate(file: Path, monkeypatch, capsys, name: str):
    asked = answered(monkeypatch, None)
    assert main([name, str(file), "--layouts", "this"]) == 0
    assert asked == ["this"]
    run = load(str(file), [])
    assert proof_of(run, run) == str(certificate_path(run))
    assert str(certificate_path(run)) in "".join(capsys.readouterr().err.split("\n"))


def test_a_model_of_your_own_that_may_not_be_split_is_told(tmp_path: Path, monkeypatch, capsys):
    """Else copies on all tensor ranks would look like a proof that the model can be split."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text(WRONG.replace("PLANT", "x"))
    own = SMALL.replace("{{layers: 2, dim: 32, heads: 4}}", "{{target: wrong:build}}")
    (tmp_path / "run.yaml").write_text(own.format(folder=tmp_path))
    answered(monkeypatch, None)
    for word, is_told in (("parallel.tensor=2", True), ("parallel.data=2", False)):
        assert main(["prove", "run.yaml", word, "--layouts", "this"]) == 0
        assert ("parallel.tensor=2" in capsys.readouterr().err) == is_told


def test_a_wrong_run_gets_a_program(file: Path, monkeypatch):
    finding = ParityFinding("blocks.0", "outputs", 0.5, 1, "a cause", kind="wrong sum")
    answered(monkeypatch, finding)
    assert main(["prove", str(file)]) == 1
    run = load(str(file), [])
    program = certificate_path(run).with_suffix(".py")
    assert proof_of(run, run) is None and not certificate_path(run).exists()
    compile(program.read_text(), str(program), "exec")
    assert "blocks.0" in program.read_text()


@pytest.mark.parametrize(
    ("layouts", "named"),
    [("data=3,foo=2", "'foo=2'"), ("tensor=16", "16 ranks"), ("data", "'data'"), ("", "''")],
)
def test_layouts_that_cannot_be_are_named(file: Path, capsys, layouts: str, named: str):
    assert main(["prove", str(file), "--layouts", layouts]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("wrong", "shown"),
    [
        ("x * (1.5 if torch.distributed.get_rank() else 1.0)", "rank 1: off by"),
        ("x / x.shape[0]", "usual cause"),
        ("x.bfloat16().to(x.dtype)", "numbers in bfloat16"),
    ],
    ids=["outputs", "micro-batches", "bf16"],
)
def test_the_program_shows_the_difference_without_the_command(
    tmp_path: Path, monkeypatch, wrong: str, shown: str
):
    """It fails while the mistake is there, and passes once it is mended."""
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "wrong.py"
    module.write_text(WRONG.replace("PLANT", wrong))
    text = SMALL.format(folder=tmp_path).replace(
        "{layers: 2, dim: 32, heads: 4}", "{target: wrong:build}"
    )
    (tmp_path / "run.yaml").write_text(text)
    assert main(["prove", "run.yaml", "--layouts", "this"]) == 1
    (program,) = (tmp_path / "runs" / "proofs").glob("*.py")
    assert "torchdistpackage.cli" not in program.read_text()
    env = {**os.environ, "PYTHONPATH": str(Path(command.__file__).parents[2])}
    outcomes = []
    for plant in (wrong, "x * 1.0"):
        module.write_text(WRONG.replace("PLANT", plant))
        words = [sys.executable, str(program)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
        outcomes.append((done.returncode, done.stdout + done.stderr))
    (failed, said), (passed, right) = outcomes
    assert failed == 1 and "AssertionError" in said and shown in said, said
    assert passed == 0 and "no difference" in right, right
