"""`tdp init` writes files that plan and train, and never over another one."""

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.texts import save_lines, save_tokenizer, sentences
from tests.models import hugging_face_folders as folders
from tests.models.hugging_face_ranks import VOCAB
from torchdistpackage.cli.main import main
from torchdistpackage.config.load import KEYS, load

NET = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(256, 16), nn.Linear(16, 256))

class Numbers:
    def batch(self, split, seed, step, data_index, num_data, per_rank, *, first=0):
        draw = torch.Generator().manual_seed(step)
        rows = torch.randint(256, (64, 8), generator=draw)[data_index * per_rank:][:per_rank]
        return rows, rows
"""
KINDS = {
    "example": ["--steps", "4"],
    "text": ["--data", "texts", "--procs", "2"],
    "lines": ["--data", "lines.jsonl", "--model", "tiny"],
    "prompts": ["--data", "prompts.jsonl", "--model", "tiny"],
    "chats": ["--data", "chats.jsonl", "--model", "tiny", "--procs", "2"],
    "pairs": ["--data", "pairs.jsonl", "--model", "tiny"],
    "rewards": ["--data", "pairs.jsonl", "--model", "tiny", "--task", "reward"],
    "labelled": ["--data", "labelled.jsonl", "--model", "tiny"],
    "anchors": ["--data", "anchors.jsonl", "--model", "tiny"],
    "classes": ["--data", "classes.jsonl", "--model", "tiny", "--task", "classification"],
    "adapters": ["--data", "chats.jsonl", "--model", "tiny", "--lora", "4"],
    "teacher": ["--data", "lines.jsonl", "--model", "tiny", "--teacher", "tiny"],
    "own model": ["--data", "texts", "--model", "net:build"],
    "own data": ["--data", "net:Numbers", "--model", "net:build", "--procs", "3"],
    "slurm": ["--where", "gpu", "--procs", "2x8"],
}
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a Llama with a tokenizer and a chat template."""
    made = folders.save("llama", tmp_path_factory.mktemp("models") / "tiny")
    save_tokenizer(made, VOCAB)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture
def folder(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the answers name, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    Path("texts").mkdir()
    for i, text in enumerate(sentences(60)):
        Path(f"texts/{i}.txt").write_text(text * 2)
    save_lines(Path("lines.jsonl"), [{"id": i, "text": x} for i, x in enumerate(sentences(60))])
    both = [{"prompt": text[:5], "completion": text} for text in sentences(60)]
    save_lines(Path("prompts.jsonl"), both)
    asked = {"role": "user", "content": "alpha beta"}
    replies = [{"role": "assistant", "content": text} for text in sentences(60)]
    save_lines(Path("chats.jsonl"), [{"messages": [asked, reply]} for reply in replies])
    pair = {"prompt": "alpha", "rejected": "gamma"}
    save_lines(Path("pairs.jsonl"), [pair | {"chosen": text} for text in sentences(60)])
    answer = {"prompt": "alpha", "label": True}
    save_lines(Path("labelled.jsonl"), [answer | {"completion": text} for text in sentences(60)])
    anchor = {"anchor": "alpha", "negatives": ["beta", "gamma"]}
    save_lines(Path("anchors.jsonl"), [anchor | {"positive": text} for text in sentences(60)])
    classes = [{"text": x, "label": ("ham", "spam")[i % 2]} for i, x in enumerate(sentences(60))]
    save_lines(Path("classes.jsonl"), classes)
    shutil.copytree(tiny, "tiny")
    return tmp_path


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_of_each_kind_of_answer_plans(folder: Path, kind: str, capsys):
    assert main(["init", *KINDS[kind]]) == 0
    assert "next:" in capsys.readouterr().out
    assert main(["plan", "run.yaml"]) == 0, capsys.readouterr().err
    run = load("run.yaml")
    names = {"example": "python_stdlib", "slurm": "python_stdlib", "own data": None}
    names |= dict.fromkeys(("lines", "prompts", "chats", "adapters", "teacher"), "jsonl")
    names |= {"pairs": "preference", "rewards": "reward", "classes": "classification"}
    names |= {"labelled": "unpaired_preference", "anchors": "embedding"}
    fields = {"prompts": "prompt+completion"} | dict.fromkeys(("chats", "adapters"), "messages")
    assert run.data.name == names.get(kind, "text")
    assert run.data.field == fields.get(kind, "text")
    assert run.data.num_negatives == (2 if kind == "anchors" else 0)
    assert run.data.labels == (("ham", "spam") if kind == "classes" else ())
    assert run.train.dpo.loss == ("kto" if kind == "labelled" else "sigmoid")
    assert run.model.lora.r == (4 if kind == "adapters" else 8)
    assert run.train.distill.teacher == ("tiny" if kind == "teacher" else None)
    if kind == "slurm":
        text = Path("run.yaml").read_text()
        assert "# cpus-per-task: 8  # CPU cores" in text and "h100:8" in text
        again = text.replace("    # cpus-per-task", "    cpus-per-task")
        Path("more.yaml").write_text(again)
        assert load("more.yaml").launch.slurm["cpus-per-task"] == 8
        assert main(["submit", "run.yaml", "--dry-run"]) == 0
        assert "#SBATCH --nodes=2" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_of_each_kind_of_answer_trains(folder: Path, kind: str):
    assert main(["init", *KINDS[kind]]) == 0
    command = [sys.executable, "-m", "torchdistpackage", "train", "run.yaml", "train.steps=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "step 2/2" in done.stdout
    assert len(Path("runs/run/metrics.jsonl").read_text().splitlines()) >= 2


def test_a_comment_is_the_text_of_its_key(folder: Path):
    assert main(["init", "--data", "chats.jsonl", "--model", "tiny", "--procs", "2"]) == 0
    text = Path("run.yaml").read_text()
    unwrapped = re.sub(r"\n +# (?=[^\n]*\n)", " ", text)
    for key in ("data.field", "model.hf", "parallel.zero", "train.steps", "launch.local.procs"):
        assert f" {KEYS[key].description}" in unwrapped, key
    assert all(len(line) <= 100 for line in text.splitlines())


@pytest.mark.parametrize(("rows", "seq_len"), [(30, 16), (6000, 32)])
def test_samples_are_no_longer_than_the_validation_part_of_a_small_file(
    folder: Path, rows: int, seq_len: int
):
    asked = {"role": "user", "content": "alpha beta"}
    chat = {"messages": [asked, {"role": "assistant", "content": "gamma"}]}
    save_lines(Path("few.jsonl"), [chat] * rows)
    assert main(["init", "--data", "few.jsonl", "--model", "tiny", "--force"]) == 0
    assert load("run.yaml").data.seq_len == seq_len


def test_a_file_that_is_there_stays_without_force(folder: Path, capsys):
    Path("run.yaml").write_text("mine")
    assert main(["init", "--steps", "2"]) == 2
    assert "run.yaml exists already" in capsys.readouterr().err
    assert Path("run.yaml").read_text() == "mine"
    assert main(["init", "--steps", "2", "--force"]) == 0
    assert load("run.yaml").train.steps == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--data", "--model", "--where", "--procs", "--steps"]),
        (["--data", "nothere"], ["nothere"]),
        (["--model", "texts"], ["texts"]),
        (["--procs", "2y8"], ["2y8", "NODESxN"]),
        (["--steps", "0"], ["steps", "0"]),
        (["--data", "odd.jsonl", "--model", "tiny"], ["author", "title", "rename"]),
        (["--data", "lines.jsonl"], ["data.tokenizer"]),  # by the rules of a run
        (["--lora", "4", "--steps", "2"], ["lora", "--model"]),
        (["--task", "rewards"], ["rewards", "unpaired_preference"]),
        (["--data", "texts", "--task", "reward"], ["reward", "texts"]),
        (["--data", "lines.jsonl", "--model", "tiny", "--task", "classification"], ["label"]),
    ],
)
def test_what_cannot_be_a_run_is_refused_and_not_written(folder: Path, capsys, options, words):
    save_lines(Path("odd.jsonl"), [{"title": "a", "author": "b"}])
    assert main(["init", *options]) == 2
    told = capsys.readouterr().err
    assert [word for word in words if word not in told] == []
    assert not Path("run.yaml").exists()


def test_a_terminal_is_asked_and_asked_again_after_a_wrong_answer(folder: Path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "torchdistpackage", "init", "--steps", "7"],
        stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"COLUMNS": "80"},
    )  # fmt: skip
    os.close(theirs)
    for answer in ("nothere", "texts", "", "", "2"):
        os.write(ours, f"{answer}\n".encode())
    told = b""
    while process.poll() is None:
        try:
            told += os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait(60) == 0, told.decode()
    assert b"1/5" in told and b"nothere" in told and b"5/5" not in told
    run = load("run.yaml")
    assert (run.data.path, run.model.name, run.launch.local.procs) == ("texts", "gpt", 2)
    assert run.train.steps == 7
