"""Data that were edited have another fingerprint, and a resumed run says so."""

import os
from pathlib import Path

import pytest

from torchdistpackage.train import data_fingerprint as module
from torchdistpackage.train.data_fingerprint import data_fingerprint


@pytest.mark.parametrize("whole_bytes", [1 << 26, 1000], ids=["whole", "in blocks"])
def test_an_edit_changes_it_and_a_copy_does_not(tmp_path: Path, monkeypatch, whole_bytes):
    monkeypatch.setattr(module, "_WHOLE_BYTES", whole_bytes)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 100)
    file = tmp_path / "a.txt"
    content = os.urandom(6400)
    file.write_bytes(content)
    before = data_fingerprint([str(file)])
    assert before
    copy = tmp_path / "b.txt"
    copy.write_bytes(content)
    assert data_fingerprint([str(copy)]) == before
    for at in (0, 3200, 6399):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert data_fingerprint([str(file)]) != before
    file.write_bytes(content + b"!")
    assert data_fingerprint([str(file)]) != before


def test_a_folder_is_its_files_and_their_names(tmp_path: Path):
    (tmp_path / "a").write_text("1")
    one = data_fingerprint([str(tmp_path)])
    (tmp_path / "a").rename(tmp_path / "b")
    assert data_fingerprint([str(tmp_path)]) != one
    assert data_fingerprint([]) == data_fingerprint([str(tmp_path / "none")]) == ""
