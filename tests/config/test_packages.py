"""The oldest releases that `model.hf` works with: refused by name before a rank starts."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.tells import tells
from torchdistpackage.cli.main import main
from torchdistpackage.config import packages
from torchdistpackage.config.packages import OLDEST, too_old

ROOT = Path(__file__).resolve().parents[2]
LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def test_setup_py_asks_for_the_same_releases() -> None:
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    asked = dict(re.findall(r'"(\w+)>=([\d.]+)"', setup))
    assert {name: asked[name] for name in OLDEST} == OLDEST


@pytest.mark.parametrize(
    ("found", "is_old"),
    [
        *(("4.55.4", True), ("4.9", True), ("3.60.0", True)),
        *(("4.56.0", False), ("4.56", False), ("4.56.0.dev0", False), ("5.24.0+cpu", False)),
        *(("4.100.1", False), ("5", False)),
    ],
)
def test_releases_are_compared_as_numbers(monkeypatch, found: str, is_old: bool) -> None:
    monkeypatch.setattr(packages, "version", lambda _: found)
    said = too_old("transformers")
    assert (said is not None) == is_old
    if said is not None:
        assert said == (
            f"needs transformers 4.56 or newer, but transformers {found} is installed; upgrade it: "
            'pip install "transformers>=4.56"'
        )


@pytest.fixture
def old(monkeypatch) -> None:
    releases = {"transformers": "4.50.3", "peft": "0.13.2"}
    monkeypatch.setattr(packages, "version", releases.__getitem__)


def run_file(folder: Path, model: str) -> str:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    path = folder / "run.yaml"
    path.write_text(f"run: {{dir: {folder}/runs}}\nmodel:\n  {model}\n")
    return str(path)


@pytest.mark.parametrize("command", ["plan", "train"])
def test_an_old_transformers_is_refused_with_the_line_of_model_hf(
    tmp_path, capsys, old, command
) -> None:
    path = run_file(tmp_path, f"hf: {tmp_path}/config.json")
    assert main([command, path]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{path}:3: model.hf: needs transformers 4.56 or newer, but transformers 4.50.3" in said
    assert "peft" not in said and not (tmp_path / "runs").exists()


def test_adamw8bit_needs_bitsandbytes(tmp_path, capsys, monkeypatch) -> None:
    path = run_file(tmp_path, "layers: 2\noptim: {name: adamw8bit}")
    monkeypatch.setattr(packages, "version", lambda _: "0.49.1")
    assert main(["plan", path]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"{path}:4: optim.name: needs bitsandbytes 0.50 or newer, but" in said
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    assert main(["train", path]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert tells(said, "optim.name", "int8")


def test_a_model_of_ours_needs_no_transformers(tmp_path, old) -> None:
    assert main(["plan", run_file(tmp_path, "layers: 2")]) == 0
