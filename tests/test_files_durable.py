"""Files that are there as a whole or not at all. No torch."""

import os
import threading

import pytest

from torchdistpackage.files import (
    appears,
    atomic_write,
    beside,
    make_folder,
    naming,
    write_all,
)


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


def test_an_error_of_a_write_names_its_file_and_other_errors_keep_theirs(tmp_path):
    with pytest.raises(OSError, match="No space left") as full, naming(tmp_path / "a"):
        write_all(os.open("/dev/full", os.O_WRONLY), b"text")
    assert full.value.filename == str(tmp_path / "a")
    with pytest.raises(FileNotFoundError) as gone, naming(tmp_path / "a"):
        (tmp_path / "b").read_bytes()
    assert gone.value.filename == str(tmp_path / "b")


def test_what_another_node_has_just_made_is_waited_for_and_nothing_else_for_ever(tmp_path):
    path = tmp_path / "late" / "name"
    assert not appears(path, limit_s=0.1)
    timer = threading.Timer(0.3, path.parent.mkdir)
    timer.start()
    assert appears(path.parent, limit_s=30)
    timer.join()


def test_folders_are_made_from_above_and_none_is_left_where_one_cannot_be(tmp_path):
    folder = tmp_path / "a" / "b"
    assert make_folder(folder) == [folder, tmp_path / "a"] and make_folder(folder) == []
    (folder / "file").touch()
    for path in (folder / "file", folder / "file" / "c"):
        with pytest.raises(OSError, match="file"):
            make_folder(path)
    long = tmp_path / "c" / ("x" * 300)
    with pytest.raises(OSError, match="too long"):
        make_folder(long)
    assert not long.parent.exists()
