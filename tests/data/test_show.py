"""`tdp data show`: samples as text, with trained tokens, documents and padding marked."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.data.test_chat import CHATML, chat
from tests.data.texts import save_lines, save_tokenizer, sentences
from torchdistpackage.cli.main import main
from torchdistpackage.data.sample_text import COLOURED, PLAIN, row_text, sample_rows
from torchdistpackage.data.source import IGNORE, DataBatch
from torchdistpackage.data.tokens.prompts import ByteCodec


def shown(tmp_path: Path, capsys, data: dict, *options: str, model: str | None = None) -> str:
    """Return what the command prints for a run of these data. model: a folder; None: a small one of
    this package.
    """
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    (tokenizer / "chat_template.jinja").write_text(CHATML)
    section = {"tokenizer": str(tokenizer), "seq_len": 128, "global_batch": 4, **data}
    section["val_fraction"] = 0.25
    own = {"name": "gpt", "vocab": 320, "dim": 32, "layers": 2, "heads": 2}
    own = own if model is None else {"hf": f"{model}/config.json"}
    run = {"run": {"dir": str(tmp_path / "runs")}, "model": own, "data": section}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(run))
    assert main(["data", "show", str(path), *options]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_chats_of_a_blend(tmp_path, capsys):
    chats = save_lines(tmp_path / "c.jsonl", [chat(f"ask {i}", f"reply {i}") for i in range(20)])
    web = save_lines(tmp_path / "web.jsonl", [{"text": text} for text in sentences(60)])
    sources = [
        {"path": str(chats), "field": "messages", "label": "chats"},
        {"path": str(web)},
    ]
    text = shown(tmp_path, capsys, {"sources": sources}, "--number", "4", "--step", "2")
    samples = re.split(r"^sample \d of step 2, ", text, flags=re.M)[1:]
    labels = [x.split(":")[0] for x in samples]
    assert len(labels) == 4 and {*labels} == {"chats", "web"}
    of_chats = next(x for x in samples if x.startswith("chats"))
    # the template's own text does not count, the reply and its end do
    assert re.search(r"<\|im_start\|>assistant\n\{\+reply \d+</s>\+\}", of_chats)
    assert not re.search(r"\{\+[^}]*ask", of_chats)
    assert "document 2, " in of_chats and "tokens of padding]" in of_chats
    counts = {row.split()[0]: row.split()[1:] for row in text.splitlines()[-3:-1]}
    assert {x: int(row[0]) for x, row in counts.items()} == {x: labels.count(x) for x in counts}
    assert (
        int(counts["web"][1].replace(",", "")) == 128 * labels.count("web") and "\x1b" not in text
    )


def test_preference_pairs(tmp_path, capsys):
    rows = [{"prompt": f"q {i} ", "chosen": f"good {i}", "rejected": "bad"} for i in range(12)]
    path = save_lines(tmp_path / "pairs.jsonl", rows)
    text = shown(tmp_path, capsys, {"name": "preference", "path": str(path)}, "--number", "1")
    assert re.search(r"sample 0 of step 1, pairs.jsonl, chosen: .*\nq \d+ \{\+good \d+", text)
    assert re.search(r"sample 0 of step 1, pairs.jsonl, rejected: .*\nq \d+ \{\+bad", text)
    assert "sample 1 of" not in text and re.search(r"^pairs.jsonl +4 +1,024 ", text, re.M)


def test_texts_to_compare(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    config = {"model_type": "llama", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2}
    config |= {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    rows = [{"anchor": f"a {i}", "positive": "b", "negatives": ["c", "d"]} for i in range(12)]
    path = save_lines(tmp_path / "texts.jsonl", rows)
    data = {"name": "embedding", "path": str(path), "num_negatives": 2}
    text = shown(tmp_path, capsys, data, "--number", "1", model=str(tmp_path / "model"))
    names = re.findall(r"^sample 0 of step 1, texts.jsonl, (.*?):", text, re.M)
    assert names == ["anchor", "positive", "negative 1", "negative 2"]
    assert re.search(r"anchor: .*\n(<s>)?a \d+(</s>)?\n", text), text


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (torch.tensor([[98, IGNORE, 100, 101]]), "a{+b+}c{+de+}"),  # next tokens
        (torch.tensor([[IGNORE, 3, IGNORE, 4]]), "a{+b+}/3c{+d+}/4"),  # a class for each token
        (torch.tensor([7]), "abcd"),  # a class for the row
    ],
)
def test_each_kind_of_target(targets, text):
    (row,) = sample_rows(DataBatch(torch.tensor([[97, 98, 99, 100]]), targets))
    assert list(row_text(row, ByteCodec(), PLAIN)) == [text]
    assert (row.target == "7") is (targets.dim() == 1)


def test_colours_and_control_characters():
    ids = torch.tensor([[27, 10, 98, 0]])
    targets = torch.tensor([[10, 98, IGNORE, IGNORE]])
    (row,) = sample_rows(DataBatch(ids, targets, torch.tensor([[0, 1, 2, 0]])))
    assert row.num_padding == 1 and row.num_trained == 2
    lines = list(row_text(row, ByteCodec(), COLOURED))
    assert lines[0] == "\x1b[2m\\x1b\x1b[0m\n\x1b[32mb\x1b[0m"
