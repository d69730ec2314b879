"""Texts in blocks: every token once an epoch, the same samples on any layout and after a resume."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.texts import json_lines, save_lines, sentences
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
