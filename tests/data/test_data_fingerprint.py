"""Edited data have another fingerprint, and a resumed run says so. No torch."""

import os
from pathlib import Path

import pytest

from torchdistpackage.config.load import loads
from torchdistpackage.data.tokens import data_fingerprint as module
from torchdistpackage.data.tokens.data_fingerprint import (
    DataFingerprints,
    data_fingerprint,
    data_fingerprints,
    edited_data,
)


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


def test_files_that_only_validations_read_are_told_apart(tmp_path: Path):
    for name in ("train", "val", "web"):
        (tmp_path / f"{name}.txt").write_text(name)
    keys = [f"data.path={tmp_path}/train.txt", f"data.val_path={tmp_path}/val.txt"]
    keys += ["data.name=text", f"data.eval={{web: {tmp_path}/web.txt}}"]
    config = loads("", overrides=keys)
    before = data_fingerprints(config)
    assert before.training and before.evaluation and before.training != before.evaluation
    assert edited_data(config, 3, before, data_fingerprints(config)) == []
    (tmp_path / "web.txt").write_text("other")
    (note,) = edited_data(config, 3, before, data_fingerprints(config))
    assert f"data.val_path {tmp_path}/val.txt, data.eval.web {tmp_path}/web.txt has other" in note
    assert "when step 3 was saved, so losses of validations" in note
    (tmp_path / "train.txt").write_text("other")
    notes = edited_data(config, 3, before, data_fingerprints(config))
    assert len(notes) == 2 and notes[0].startswith("data.path") and "the samples from" in notes[0]
    assert edited_data(config, 0, before, data_fingerprints(config)) == []
    unknown = DataFingerprints(before.training)  # of a checkpoint before there was the second one
    assert len(edited_data(config, 3, unknown, data_fingerprints(config))) == 1
