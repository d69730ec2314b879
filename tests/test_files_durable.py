"""Files that are there as a whole or not at all. No torch."""

import os

import pytest

from torchdistpackage.files import atomic_write, beside


def test_a_file_is_replaced_and_nothing_lies_beside_it(tmp_path):
    path = tmp_path / "new" / "decision.7.0"
    for text in ("requeue after step 3\n", "stop\n"):
        atomic_write(path, text)
        assert path.read_text() == text
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "report"
    atomic_write(path, "before")
    with pytest.raises(UnicodeEncodeError):
        atomic_write(path, "a lone surrogate: \ud800")
    assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def test_two_processes_with_the_same_id_on_two_machines_write_under_two_names(
    tmp_path, monkeypatch
):
    path = tmp_path / "report"
    here = beside(path)
    monkeypatch.setattr("socket.gethostname", lambda: "n7")
    there = beside(path)
    assert str(os.getpid()) in here.name and "n7" in there.name
    assert len({here, there, beside(path)}) == 3 and here.name.startswith(".")
