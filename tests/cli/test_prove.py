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

SMALL = (
    "run: {{dir: {folder}/runs}}\nparallel: {{data: 2}}\nmodel: {{layers: 2, dim: 32, heads: 4}}\n"
    "data: {{seq_len: 16}}\nlaunch: {{local: {{procs: null}}}}\n"
)
WRONG = '''
from torch import nn


class Scaled(nn.Module):
    """Divides by the number of samples of a micro-batch of one rank."""

    def forward(self, x):
        return x / x.shape[0]


def build(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Embedding(256, width), Scaled(), nn.Linear(width, 256))
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(SMALL.format(folder=tmp_path))
    return path


def answered(monkeypatch: pytest.MonkeyPatch, finding: ParityFinding | None) -> list[str]:
    """Let the comparison find this; returns the layouts that it is asked for."""
    asked: list[str] = []

    def compare(plan: object, say: object, layouts: str) -> ParityReport:
        asked.append(layouts)
        return ParityReport([({"data": 2}, finding)])

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


@pytest.mark.full
def test_the_program_shows_the_difference(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text(WRONG)
    text = SMALL.format(folder=tmp_path).replace(
        "{layers: 2, dim: 32, heads: 4}", "{target: wrong:build}"
    )
    (tmp_path / "run.yaml").write_text(text)
    assert main(["prove", "run.yaml", "--layouts", "this"]) == 1
    (program,) = (tmp_path / "runs" / "proofs").glob("*.py")
    env = {**os.environ, "PYTHONPATH": str(Path(command.__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(program)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    assert "1: outputs" in done.stdout, done.stdout + done.stderr
