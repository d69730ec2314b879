"""Texts in blocks: every token once an epoch, the same samples on any layout and after a resume."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.data.texts import json_lines, save_lines, save_tokenizer, sentences
from torchdistpackage.data.source import IGNORE
from torchdistpackage.data.streaming import PackingOptions, StreamedDataset
from torchdistpackage.data.tokens.documents import TextSource
from torchdistpackage.data.tokens.token_cache import tokenized
from torchdistpackage.errors import DataError

SEQ, BATCH = 16, 4


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("torchdistpackage.data.tokens.documents.PIECE_BYTES", 400)
    monkeypatch.setattr("torchdistpackage.data.tokens.text_blocks.BLOCK_BYTES", 2000)


def streamed(source: TextSource, cache: Path, **changes: object) -> StreamedDataset:
    values = {"vocab": 400, "seq_len": SEQ, "global_batch": BATCH, "document_masks": False}
    return StreamedDataset(
        source, cache, PackingOptions(**{**values, "packing": "wrapped", **changes})
    )


def entries(cache: Path) -> int:
    return sum(path.is_dir() for path in cache.iterdir())


def test_training_begins_before_all_is_tokenized(tmp_path, monkeypatch):
    data = streamed(json_lines(tmp_path, sentences(200)), tmp_path / "cache")
    monkeypatch.setattr(data._blocks, "make_ahead", lambda numbers: None)
    data.batch("train", 1, 1, 0, 1, BATCH)
    assert len(data._blocks) > 5 and entries(tmp_path / "cache") == 1


@pytest.mark.parametrize("packing", ["wrapped", "whole"])
def test_an_epoch_has_every_document_once_in_a_new_order(tmp_path, packing):
    source = json_lines(tmp_path, sentences(120))
    text = tokenized(source, tmp_path / "cache")
    # the first token of a document has no target, as another document precedes it
    firsts = text.tokens[text.starts].tolist()
    every = Counter(text.tokens.tolist()) - Counter(firsts)
    data = streamed(source, tmp_path / "cache", packing=packing)
    number = sum(data._count(block) for block in range(len(data._blocks)))
    epochs = []
    for epoch in range(2):
        rows = [
            data.batch("train", 5, 1, 0, 1, 1, first=epoch * number + i)[1][0]
            for i in range(number)
        ]
        epochs.append(torch.cat([row[row != IGNORE] for row in rows]).tolist())
    if packing == "wrapped":
        assert Counter(epochs[0]) == every
    assert Counter(epochs[0]) == Counter(epochs[1]) and epochs[0] != epochs[1]


def test_samples_are_the_same_on_any_data_degree_and_after_a_resume(tmp_path):
    source = json_lines(tmp_path, sentences(60))
    data = streamed(source, tmp_path / "cache", document_masks=True)
    steps = [data.batch("train", 3, step, 0, 1, BATCH) for step in range(1, 60)]
    assert data._last.epoch == 1
    for step in (1, 17, 59):
        # of a start of its own, whose cache may be gone
        resumed = streamed(source, tmp_path / f"of {step}", document_masks=True)
        parts = [resumed.batch("train", 3, step, i, 2, BATCH // 2) for i in range(2)]
        for whole, halves in zip(steps[step - 1], zip(*parts, strict=True), strict=True):
            assert torch.equal(whole, torch.cat(halves))
    again = data.batch("train", 3, 17, 0, 1, BATCH)
    assert all(map(torch.equal, again, steps[16]))
    part = data.part([range(2, 5), range(9, 12)]).batch("train", 3, 17, 0, 1, BATCH)
    assert torch.equal(part[0], steps[16][0][:, [2, 3, 4, 9, 10, 11]])


def decoded(folder: str, ids: np.ndarray) -> str:
    return Tokenizer.from_file(f"{folder}/tokenizer.json").decode(
        ids.tolist(), skip_special_tokens=False
    )


def test_a_long_text_is_streamed_in_parts_of_complete_lines(tmp_path):
    lines = "".join(f"{x}\n" for x in sentences(120))
    (tmp_path / "a.txt").write_text("\ufeff" + lines, encoding="utf-8")
    # one line of characters of two bytes, cut between two of them
    (tmp_path / "b.txt").write_text("é" * 3001, encoding="utf-8")
    folder = str(save_tokenizer(tmp_path / "tokenizer", bos=True))
    source = TextSource("text", str(tmp_path / "a.txt"), folder)
    blocks = streamed(source, tmp_path / "cache")._blocks
    texts = [blocks.read(number) for number in range(len(blocks))]
    assert len(texts) > 3
    parts = [
        decoded(folder, text.tokens[a:b])
        for text in texts
        for a, b in zip(text.starts, text.ends, strict=True)
    ]
    assert len(parts) > len(texts) and all(part.endswith("\n") for part in parts[:-1])
    assert "".join(parts) == f"<s>{lines}</s>"
    names = [text.origin(0) for text in texts]
    assert names[0] == f"{tmp_path}/a.txt:1" and "a.txt, from byte " in names[1]
    joined = streamed(
        TextSource("text", str(tmp_path / "b.txt"), folder), tmp_path / "cache"
    )._blocks
    ids = np.concatenate([joined.read(number).tokens for number in range(len(joined))])
    assert decoded(folder, ids) == f"<s>{'é' * 3001}</s>" and len(joined) > 1
    whole = tokenized(source, tmp_path / "cache")
    assert len(whole.ends) == 1 and len(whole.tokens) <= sum(len(x.tokens) for x in texts)


def test_a_streamed_text_goes_on_where_it_was(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(sentences(60)), encoding="utf-8")
    source = TextSource("text", str(tmp_path / "a.txt"), str(save_tokenizer(tmp_path / "t")))
    data = streamed(source, tmp_path / "cache")
    steps = [data.batch("train", 3, step, 0, 1, BATCH) for step in range(1, 60)]
    resumed = streamed(source, tmp_path / "elsewhere")
    for step in (1, 17, 59):
        halves = [resumed.batch("train", 3, step, i, 2, BATCH // 2) for i in range(2)]
        for whole, parts in zip(steps[step - 1], zip(*halves, strict=True), strict=True):
            assert torch.equal(whole, torch.cat(parts))


def test_a_byte_that_is_no_text_is_named_by_its_place_in_the_file(tmp_path):
    content = "".join(f"{x}\n" for x in sentences(60)).encode()
    (tmp_path / "a.txt").write_bytes(content[:5000] + b"\xff" + content[5000:])
    source = TextSource("text", str(tmp_path / "a.txt"), str(save_tokenizer(tmp_path / "t")))
    data = streamed(source, tmp_path / "cache")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 text: byte 5000;"):
        for number in range(len(data._blocks)):
            data._blocks.read(number)


def test_a_wrong_line_is_named_when_its_block_is_read(tmp_path):
    rows: list[dict] = [{"text": text} for text in sentences(150)]
    rows[140] = {"text": 5}
    source = json_lines(tmp_path, ["alpha"])
    save_lines(Path(source.path), rows)
    data = streamed(source, tmp_path / "cache")
    with pytest.raises(DataError, match=r"data\.jsonl:141: field 'text' is a int"):
        for step in range(1, 999):
            data.batch("train", 1, step, 0, 1, BATCH)
    assert step > 1
    with pytest.raises(DataError, match="no validation"):
        data.batch("val", 1, 1, 0, 1, BATCH)


def test_blocks_of_several_files_and_their_names(tmp_path):
    source = json_lines(tmp_path, sentences(30))
    Path(source.path).rename(tmp_path / "b.jsonl")
    save_lines(tmp_path / "a.jsonl", [{"text": text} for text in sentences(40, seed=2)])
    folder = TextSource("jsonl", str(tmp_path), source.tokenizer)
    data = streamed(folder, tmp_path / "cache")
    texts = [data._blocks.read(block) for block in range(len(data._blocks))]
    whole = tokenized(folder, tmp_path / "cache")
    assert np.array_equal(np.concatenate([x.tokens for x in texts]), whole.tokens)
    names = [text.origin(0) for text in texts]
    assert names[0] == f"{tmp_path}/a.jsonl:1" and "from byte" in names[1]
