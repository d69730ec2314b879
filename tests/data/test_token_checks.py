"""A changed cache entry is refused, and planted files are left alone. No torch."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.data.texts import pairs
from torchdistpackage.data.tokens import token_checks
from torchdistpackage.data.tokens.token_cache import tokenized
from torchdistpackage.errors import DataError, LaunchError
from torchdistpackage.files import append_json, append_text, open_regular
from torchdistpackage.launch.lock import take_away

TEXTS = [(f"alpha {i}", " beta gamma") for i in range(20)]


def ids_within_the_vocabulary(folder: Path) -> None:
    ids = np.memmap(folder / "tokens.bin", "uint16", mode="r+")
    ids[3], ids[4] = ids[4], ids[3] + 1
    ids.flush()


def unsorted_ends(folder: Path) -> None:
    ends = np.fromfile(folder / "ends.bin", np.int64)
    ends[[1, 2]] = ends[[2, 1]]
    ends.tofile(folder / "ends.bin")


def counts(folder: Path) -> None:
    np.zeros_like(np.fromfile(folder / "counted.bin", np.uint8)).tofile(folder / "counted.bin")


def meta(folder: Path) -> None:
    found = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**found, "eos": 5}))


def meta_of_another(folder: Path) -> None:
    other = folder.parent.parent / "other"
    other.mkdir()
    made = tokenized(pairs(other, TEXTS[:5]), other / "cache").folder
    for file in made.iterdir():
        file.replace(folder / file.name)


def a_pipe(folder: Path) -> None:
    (folder / "places.bin").unlink()
    os.mkfifo(folder / "places.bin")


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (ids_within_the_vocabulary, r"tokens\.bin has changed since"),
        (unsorted_ends, r"ends\.bin has changed since"),
        (counts, r"counted\.bin has changed since"),
        (meta, r"meta\.json has changed since"),
        (meta_of_another, r"meta\.json belongs to the entry"),
        (a_pipe, "is a pipe"),
    ],
)
def test_an_entry_that_was_changed_is_refused(tmp_path, monkeypatch, damage, text):
    monkeypatch.setattr(token_checks, "SETTLED_S", -1e9)  # a moment ago is long ago
    source = pairs(tmp_path, TEXTS)
    entry = tokenized(source, tmp_path / "cache").folder
    assert entry.with_name(f"{entry.name}.checked").exists()
    damage(entry)
    with pytest.raises(DataError, match=rf"the cache entry .* is damaged \(.*{text}.*remove it"):
        tokenized(source, tmp_path / "cache")


def test_files_that_did_not_change_are_read_once(tmp_path, monkeypatch):
    reads = list[str]()
    add_file = token_checks.add_file

    def counting(checksum, path: Path) -> int:
        reads.append(path.name)
        return add_file(checksum, path)

    monkeypatch.setattr(token_checks, "add_file", counting)
    source = pairs(tmp_path, TEXTS)
    tokenized(source, tmp_path / "cache")
    tokenized(source, tmp_path / "cache")
    assert reads.count("tokens.bin") == 2, "what changed a moment ago may change without a trace"
    monkeypatch.setattr(token_checks, "SETTLED_S", -1e9)
    entry = tokenized(source, tmp_path / "cache").folder
    tokenized(source, tmp_path / "cache")
    assert reads.count("tokens.bin") == 3
    (entry / "ends.bin").touch()
    tokenized(source, tmp_path / "cache")
    assert reads.count("tokens.bin") == 4


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_lock_that_another_planted_is_left_alone(tmp_path, kind):
    source = pairs(tmp_path, TEXTS)
    name = tokenized(source, tmp_path / "first").folder.name
    victim, lock = tmp_path / "victim", tmp_path / "cache" / f"{name}.lock"
    victim.write_text("mine")
    lock.parent.mkdir()
    {
        "link": lambda: lock.symlink_to(victim),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
    }[kind]()
    with pytest.raises(DataError, match="cannot write the cache"):
        tokenized(source, tmp_path / "cache")
    assert victim.read_text() == "mine"
    lock.rmdir() if kind == "folder" else lock.unlink()
    lock.write_text("of an earlier version")
    assert tokenized(source, tmp_path / "cache").folder.name == name
    assert lock.read_text() == "of an earlier version", "a lock is never emptied"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_no_log_or_marker_of_a_shared_folder_follows_a_link_or_waits(tmp_path, kind):
    victim, planted = tmp_path / "victim", tmp_path / "planted"
    victim.write_text("mine")
    planted.symlink_to(victim) if kind == "link" else os.mkfifo(planted)
    said = "symbolic link" if kind == "link" else "pipe"
    for use in (
        lambda: append_json(planted, {"a": 1}),
        lambda: append_text(planted),
        lambda: open_regular(planted, os.O_RDONLY),
        lambda: open_regular(planted, os.O_WRONLY | os.O_CREAT),
        lambda: take_away(planted, None, by_force=True),
    ):
        with pytest.raises((OSError, LaunchError), match=said):
            use()
    assert victim.read_text() == "mine"
