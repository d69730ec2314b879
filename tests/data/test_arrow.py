"""Folders of Hugging Face `datasets` give the ids of the same rows in JSON lines."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_chat import CHATML, chat
from tests.data.texts import save_lines, save_tokenizer, sentences
from torchdistpackage.data.tokens.documents import TextSource, files_of
from torchdistpackage.data.tokens.token_cache import tokenized
from torchdistpackage.errors import DataError

arrow = pytest.importorskip("pyarrow", reason="arrow files are optional")


def write(path: Path, rows: list[dict], per_batch: int = 7) -> None:
    """Write rows as `datasets` does: a stream of record batches."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = arrow.Table.from_pylist(rows)
    with arrow.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=per_batch)


def same_ids(source: TextSource, other: TextSource, cache: Path) -> bool:
    one, two = tokenized(source, cache), tokenized(other, cache)
    masks = (x.counted if x.counted is not None else np.ones(0) for x in (one, two))
    return np.array_equal(one.tokens, two.tokens) and np.array_equal(*masks)


def test_a_saved_folder_has_the_ids_of_json_lines(tmp_path, monkeypatch):
    monkeypatch.setattr("torchdistpackage.data.tokens.arrow_rows.PIECE_BYTES", 300)
    rows = [{"text": x, "n": i} for i, x in enumerate(sentences(40))]
    folder = tmp_path / "saved"
    for number, part in enumerate((rows[:25], rows[25:])):
        write(folder / f"data-{number:05}-of-00002.arrow", part)
    write(folder / "cache-0a1b.arrow", rows[:3])  # what `map` left there
    (folder / "state.json").write_text(json.dumps({"_data_files": []}))
    source = TextSource("arrow", str(folder), str(save_tokenizer(tmp_path / "t")))
    lines = save_lines(tmp_path / "x.jsonl", rows)
    assert same_ids(source, replace(source, kind="jsonl", path=str(lines)), tmp_path / "cache")
    with pytest.raises(DataError, match=r"arrow: no column 'body'; there are text, n"):
        tokenized(replace(source, field="body"), tmp_path / "cache")
    (folder / "data-00001-of-00002.arrow").write_bytes(b"no")
    with pytest.raises(DataError, match=r"cannot read .*00001-of-00002\.arrow as a stream"):
        tokenized(source, tmp_path / "cache")


def test_of_several_splits_train_is_read(tmp_path):
    rows = [{"text": x} for x in sentences(3)]
    saved, cached = tmp_path / "saved", tmp_path / "cached"
    for split in ("train", "test"):
        write(saved / split / "data-00000-of-00001.arrow", rows)
        write(cached / f"my-set-{split}.arrow", rows)
    (saved / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    assert files_of("arrow", saved) == [saved / "train" / "data-00000-of-00001.arrow"]
    assert files_of("arrow", cached) == [cached / "my-set-train.arrow"]
    assert files_of("arrow", saved / "test") == [saved / "test" / "data-00000-of-00001.arrow"]
    (cached / "my-set-train.arrow").rename(cached / "my-set-dev.arrow")
    with pytest.raises(DataError, match="splits 'dev', 'test', and none is train"):
        files_of("arrow", cached)


@pytest.mark.filterwarnings("ignore")
def test_what_datasets_saves_is_read(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is no dependency: a peer")
    rows = [chat(f"ask {i}", f"reply {i}") for i in range(12)]
    made = datasets.Dataset(arrow.Table.from_pylist(rows), fingerprint="a1")
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "saved"))
    tokenizer = save_tokenizer(tmp_path / "t")
    (tokenizer / "chat_template.jinja").write_text(CHATML)
    source = TextSource("arrow", str(tmp_path / "saved"), str(tokenizer), "messages")
    lines = save_lines(tmp_path / "x.jsonl", rows)
    assert same_ids(source, replace(source, kind="jsonl", path=str(lines)), tmp_path / "cache")
