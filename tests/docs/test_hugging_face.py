"""The configuration and the refusals of docs/hugging_face.md are those of the package."""

import json
import re
import shlex
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.data.texts import save_tokenizer, sentences
from tests.models import hugging_face_folders as folders
from tests.models.hugging_face_ranks import VOCAB
from tests.tells import tells
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.build import build

PAGE = (Path(__file__).parents[2] / "docs" / "hugging_face.md").read_text(encoding="utf-8")
YAML = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1]
COMMAND, REFUSED = re.search(r"```\n\$ (.*?)\n(.*?)```", PAGE, re.DOTALL).groups()

SMALL = [
    *("data.seq_len=16", "data.global_batch=8", "pipeline.microbatches=2"),
    "train.eval_batches=1",
]


def first_step(folder: str, overrides: list[str]) -> float:
    """Loss of the file's run."""
    with chdir(folder):
        plan = make_plan(load("run.yaml", overrides), dist.get_world_size())
        run = build(plan, dist.get_rank(), torch.device("cpu"))
        try:
            return run.train_step(1).wait().loss
        finally:
            run.close()


@pytest.fixture
def files(tmp_path, monkeypatch):
    """What the file of the page names, small, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(YAML)
    save_tokenizer(folders.save("llama", Path("Llama-3.2-1B")), VOCAB)
    Path("notes").mkdir()
    for i, text in enumerate(sentences(8)):
        Path(f"notes/{i}.txt").write_text(text)
    return tmp_path


def test_the_configuration_of_the_page_plans(files, capsys):
    assert main(["plan", "run.yaml"]) == 0
    assert tells(capsys.readouterr().out, "data=2", "pipe=2", "context=1", "tensor=2")


@pytest.mark.full
def test_the_configuration_of_the_page_runs(files, capsys):
    """Two steps of shorter samples on threads as ranks."""
    assert main(["comm", "lint", "run.yaml", *SMALL]) == 0
    assert "two steps, 8 threads as ranks" in (shown := capsys.readouterr().out)
    assert "no ranks deadlock (in two steps)" in shown


@pytest.mark.full
def test_threads_import_transformers_in_turn(files):
    """In a process in which nothing of it is imported."""
    command = [sys.executable, "-m", "torchdistpackage", "comm", "lint", "run.yaml", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_the_configuration_of_the_page_trains_as_in_one_process(ranks, files):
    small = [*SMALL, "precision.dtype=float64", f"run.dir={files}/runs"]
    alone = ["parallel={data: 1, pipe: 1, tensor: 1, zero: 0}"]
    (truth,) = ranks(1).run(first_step, str(files), [*small, *alone])
    assert ranks(8).run(first_step, str(files), small) == pytest.approx([truth] * 8, rel=1e-6)


def test_the_refusals_of_the_page_are_those_that_are_printed(tmp_path, monkeypatch, capsys):
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    llama = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 22, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({**llama, "vocab_size": 300}))
    (tmp_path / "run.yaml").write_text("model: {hf: config.json}\ndata: {seq_len: 12}\n")
    monkeypatch.chdir(tmp_path)
    name, *args = shlex.split(COMMAND)
    assert name == "tdp" and main(args) == 2
    assert capsys.readouterr().err == REFUSED


@pytest.mark.parametrize("text", sorted(set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))))
def test_what_shows_it_is_there(text):
    assert (Path(__file__).parents[2] / text).is_file()
