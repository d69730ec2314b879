"""The commands of docs/generate.md run, and its line is the one that is printed."""

import re
import shlex
from pathlib import Path

import pytest

from tests.data.texts import save_lines, save_tokenizer, sentences
from tests.models import hugging_face_folders as folders
from tests.models.hugging_face_ranks import VOCAB, save_run
from tests.train.inference_ranks import run_in
from torchdistpackage.cli import _inference
from torchdistpackage.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "generate.md").read_text(encoding="utf-8")
COMMANDS = re.search(r"```sh\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()
LINE = re.search(r"```\n(loss .*?)\n", PAGE)[1]


@pytest.mark.full
def test_the_commands_of_the_page_run(ranks, tmp_path, monkeypatch, capsys):
    assert len(COMMANDS) == 6
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_inference, "run_local", run_in(ranks))
    Path("notes.txt").write_text(" ".join(sentences(8)))
    data = ["data.name=text", f"data.path={tmp_path / 'notes.txt'}", "data.val_fraction=0.2"]
    ranks(2).run(save_run, [*data, f"run.dir={tmp_path}/runs", "run.name=mine", "parallel.pipe=2"])
    save_tokenizer(folders.save("llama", tmp_path / "Llama-tiny"), VOCAB)
    Path("question.txt").write_text("alpha beta")
    save_lines(Path("notes.jsonl"), [{"text": text} for text in sentences(3)])
    said = []
    for command in COMMANDS:
        name, *args = shlex.split(command)
        assert name == "tdp" and main(args) == 0, command
        said.append(capsys.readouterr().out)
    assert said[0].startswith("import ") and said[1].count("def ") == 1
    assert said[2].startswith("alpha beta")
    plain = re.sub(r"[\d.,]+\d", "N", LINE).replace("notes.txt", "validation data")
    assert re.sub(r"[\d.,]+\d", "N", said[3]).replace("step 1", "step N").strip() == plain
    assert '"tokens": ' in said[4] and "notes.jsonl" in said[5]


@pytest.mark.parametrize("text", re.findall(r"`(tests/[\w/]+\.py)`", PAGE))
def test_what_shows_it_is_there(text):
    assert (Path(__file__).parents[2] / text).is_file()
