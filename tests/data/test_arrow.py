"""Folders of Hugging Face `datasets` give the ids of the same rows in JSON lines."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_chat import CHATML, chat
from tests.data.texts import save_lines, save_tokenizer, sentences
from tests.tells import facts_pattern
from tests.train import parity
from torchdistpackage.config.cached_datasets import cache_folder
from torchdistpackage.config.check import absent_files
from torchdistpackage.data.tokens.data_fingerprint import data_fingerprint
from torchdistpackage.data.tokens.documents import TextSource, files_of
from torchdistpackage.data.tokens.token_cache import tokenized
from torchdistpackage.errors import ConfigError, DataError

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
    with pytest.raises(DataError, match=r"arrow: no column 'body'; .*text, n"):
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
    with pytest.raises(DataError, match=facts_pattern("'dev'", "'test'")):
        files_of("arrow", cached)


def cached(cache: Path, folder: str, number: int, *splits: str) -> Path:
    """Write what `datasets` keeps of a data set; number: seconds after the epoch."""
    made = cache / folder
    for split in splits:
        write(made / f"set-{split}.arrow", [{"text": f"{split} {number}"}])
    (made / "dataset_info.json").write_text("{}")
    os.utime(made / "dataset_info.json", (number, number))
    return made


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    both = ("train", "test")
    old = cached(tmp_path / "cache", "wikitext/raw-v1/1.0.0/aa", 10, *both)
    new = cached(tmp_path / "cache", "wikitext/raw-v1/1.0.0/bb", 20, *both)
    os.utime(old)  # `map` wrote a result there
    os.utime(new, (5, 5))
    cached(tmp_path / "cache", "wikitext/raw-v1/1.0.0/cc.incomplete", 30, *both)
    cached(tmp_path / "cache", "wikitext/v1/1.0.0/aa", 40, *both)
    cached(tmp_path / "cache", "Org___my_chats/default/0.0.0/aa", 10, "train")
    cached(tmp_path / "cache", "a___b/x/0.0.0/aa", 10, "dev", "test")
    cached(tmp_path / "cache", "a/b/0.0.0/aa", 10, "train")
    return tmp_path / "cache"


def test_a_cached_name_is_its_newest_rows(cache):
    newest = cache / "wikitext/raw-v1/1.0.0/bb"
    for name, file in {
        "wikitext/raw-v1": newest / "set-train.arrow",
        "wikitext/raw-v1:test": newest / "set-test.arrow",
        "Org/MyChats": cache / "Org___my_chats/default/0.0.0/aa/set-train.arrow",
        "Org/my_chats/default:train": cache / "Org___my_chats/default/0.0.0/aa/set-train.arrow",
    }.items():
        assert files_of("arrow", Path(f"datasets:{name}")) == [file]
    before = data_fingerprint(["datasets:wikitext/raw-v1"])
    assert before == data_fingerprint([str(newest)]) != ""
    cached(cache, "wikitext/raw-v1/1.0.0/dd", 50, "train")
    assert data_fingerprint(["datasets:wikitext/raw-v1"]) != before


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wikitext", ["2 data sets", "wikitext/raw-v1, wikitext/v1"]),
        ("a/b", ["2 data sets", "a/b, a/b/x"]),
        ("wikitext/raw", ["is not in", "raw-v1, v1"]),
        ("wiki", ["is not in", "Org/my_chats, a, a/b, wikitext;"]),
        ("a/../b", ["not a name of a data set"]),
        ("a/b/x:train", ["'dev', 'test'", "none is train"]),
        ("wikitext/v1:dev", ["'test', 'train'", "none is dev"]),
    ],
)
def test_a_name_that_is_none_or_several_is_refused(cache, name, words):
    with pytest.raises(DataError) as caught:
        files_of("arrow", Path(f"datasets:{name}"))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_config_with_cached_names_is_checked(cache, tmp_path):
    tokenizer = f"data.tokenizer={save_tokenizer(tmp_path / 't')}"
    sources = "data.sources=[{path: 'datasets:wikitext/v1'}, {path: 'datasets:absent'}]"
    config = parity.config([tokenizer, sources, "data.val_path=datasets:wikitext/v1:test"])
    assert [part.name for part in config.data.all_parts.values()] == ["arrow"] * 3
    assert [x.path for x in absent_files(config)] == ["data.sources[1].path"]
    config = parity.config([tokenizer, "data.name=arrow", "data.path=wikitext/v1"])
    assert "datasets:wikitext/v1" in absent_files(config)[0].text
    with pytest.raises(ConfigError, match=r"data\.path=datasets:wikitext/v1 .* name=arrow reads"):
        parity.config([tokenizer, "data.name=jsonl", "data.path=datasets:wikitext/v1"])


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HF_DATASETS_CACHE": "/c", "HF_HOME": "/h"}, "/c"),
        ({"HF_HOME": "/h"}, "/h/datasets"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/datasets"),
        ({}, "~/.cache/huggingface/datasets"),
    ],
)
def test_the_cache_is_where_datasets_has_it(environ, folder):
    assert cache_folder(environ) == Path(folder).expanduser()


@pytest.mark.filterwarnings("ignore")
def test_what_datasets_has_cached_is_read_by_name(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is no dependency: a peer")
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "DOWNLOADED_DATASETS_PATH", str(cache / "downloads"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    rows = {name: [{"text": f"{name} {i}"} for i in range(9)] for name in ("train", "test")}
    files = {name: str(save_lines(tmp_path / f"{name}.jsonl", x)) for name, x in rows.items()}
    theirs = datasets.load_dataset("json", data_files=files)
    source = TextSource("arrow", "", str(save_tokenizer(tmp_path / "t")))
    for split, lines in files.items():
        mine = replace(source, path=f"datasets:json:{split}")
        assert [str(x) for x in files_of("arrow", Path(mine.path))] == [
            x["filename"] for x in theirs[split].cache_files
        ]
        assert same_ids(mine, replace(source, kind="jsonl", path=lines), tmp_path / "ids")


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
