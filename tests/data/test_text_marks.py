"""Byte order marks and empty lines are left out of a text; other encodings are refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.texts import json_lines, save_tokenizer, sentences
from torchdistpackage.bounded import BOM
from torchdistpackage.config.hugging_face import special_tokens, vocabulary_size
from torchdistpackage.data import corpus
from torchdistpackage.data.tokens.token_cache import TokenizedText, tokenized
from torchdistpackage.errors import DataError


def documents(found: TokenizedText) -> list[list[int]]:
    at = zip(found.starts, found.ends, strict=True)
    return [found.tokens[a:b].tolist() for a, b in at]


def test_marks_and_empty_lines_change_no_id_and_no_number_of_a_line(tmp_path):
    texts = sentences(6)
    source = json_lines(tmp_path, texts)
    plain = tokenized(source, tmp_path / "cache")
    lines = Path(source.path).read_bytes().splitlines()
    written = [BOM + lines[0], b"", lines[1], b" \t", BOM + lines[2], *lines[3:], b"", b""]
    Path(source.path).write_bytes(b"\r\n".join(written))
    found = tokenized(source, tmp_path / "cache")
    assert documents(found) == documents(plain)
    at = [found.origin(i).rpartition(":")[2] for i in range(6)]
    assert at == ["1", "3", "5", "6", "7", "8"]
    with Path(source.path).open("ab") as file:
        file.write(b"\n{no\n")
    with pytest.raises(DataError, match=r"data\.jsonl:11: not JSON"):
        tokenized(source, tmp_path / "cache")


def test_a_mark_is_no_part_of_a_text(tmp_path):
    folder, texts = save_tokenizer(tmp_path / "tokenizer"), tmp_path / "texts"
    source = replace(json_lines(tmp_path, sentences(2)), kind="text", path=str(texts))
    texts.mkdir()
    (texts / "a.txt").write_bytes("alpha \u00e9".encode())
    plain = documents(tokenized(source, tmp_path / "cache"))
    (texts / "a.txt").write_bytes(BOM + "alpha \u00e9".encode())
    assert documents(tokenized(source, tmp_path / "cache")) == plain
    for names in (["b.txt"], ["b.txt", "c.txt"]):  # bytes as tokens, of one file and of several
        for number, name in enumerate(names):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / "bytes").mkdir(exist_ok=True)
            (tmp_path / "bytes" / name).write_bytes(
                BOM + b"alpha beta " * 20 + bytes([number + 65])
            )
        sides = corpus.text(tmp_path / "bytes", 0.1)
        read = [np.asarray(x[0 : len(x)]).tobytes() for x in (sides.train, sides.val)]
        assert not any(BOM in x for x in read) and read[0].startswith(b"alpha")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes(BOM + (folder / name).read_bytes())
    assert special_tokens(folder)["eos_token"] == "</s>"
    assert vocabulary_size(folder / "tokenizer.json") == 300
    marked = replace(source, tokenizer=str(folder))
    assert documents(tokenized(marked, tmp_path / "cache")) == plain


@pytest.mark.parametrize("code", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_other_encodings_are_refused_by_name(tmp_path, code):
    source = json_lines(tmp_path, ["alpha"])
    line = json.dumps({"text": "alpha"}) + "\n"
    Path(source.path).write_bytes(line.encode(code))
    name = "UTF-16" if "16" in code else "UTF-32"
    with pytest.raises(DataError, match=rf"data\.jsonl is .*{name}.*; save it as UTF-8"):
        tokenized(source, tmp_path / "cache")
    for asked in (replace(source, kind="text"),):
        with pytest.raises(DataError, match=rf"{name}.*; save it as UTF-8"):
            tokenized(asked, tmp_path / "cache")
    with pytest.raises(DataError, match=rf"{name}.*; save it as UTF-8"):
        corpus.text(source.path, 0.1)


def test_a_file_that_is_one_json_list_is_told_how_to_become_lines(tmp_path):
    source = json_lines(tmp_path, ["alpha"])
    Path(source.path).write_text('[\n{"text": "alpha"}\n]\n')
    with pytest.raises(DataError, match=r"data\.jsonl:1: not JSON.*jq -c"):
        tokenized(source, tmp_path / "cache")
