"""What counts as a checkpoint, and what is left of one that does not. No torch."""

import errno
import logging
from pathlib import Path

import pytest

from torchdistpackage.checkpoint import commit as commits
from torchdistpackage.checkpoint import manifest as manifests
from torchdistpackage.checkpoint.commit import damage, latest
from torchdistpackage.checkpoint.manifest import Manifest
from torchdistpackage.checkpoint.retention import Retention


def write(folder: Path, step: int, content: bytes = b"weights", keep_last: int = 9) -> Path:
    """A checkpoint of two files, by the steps that save() takes."""
    temporary = commits.make_temporary(folder, step)
    files = {}
    for name in ("a", "b"):
        (temporary / name).write_bytes(content)
        commits.settle(temporary / name)
        files[name] = commits.measure(temporary / name)
    final = commits.commit(temporary, Manifest(step, 0, (), {}, files))
    commits.retain(folder, Retention(keep_last), final)
    return final


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_the_latest(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "none") is None
    for step in (9, 1000000, 20):
        path = write(tmp_path, step)
        assert path == tmp_path / f"step_{step:06d}"
        assert damage(path, checksums=True) is None
    assert latest(tmp_path, checksums=True) == tmp_path / "step_1000000"


def test_it_is_private_until_it_counts_and_then_as_open_as_its_folder(tmp_path):
    tmp_path.chmod(0o750)
    temporary = commits.make_temporary(tmp_path, 3)
    assert temporary.stat().st_mode & 0o777 == 0o700
    path = write(tmp_path, 4)
    assert path.stat().st_mode & 0o777 == 0o750
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}


@pytest.mark.parametrize(
    "harm,words",
    [
        (lambda p: (p / "b").write_bytes(b"Weights"), "b has checksum"),
        (lambda p: (p / "b").write_bytes(b"weight"), "b has 6 bytes, the manifest says 7"),
        (lambda p: (p / "b").unlink(), "b is missing"),
        (lambda p: (p / manifests.NAME).unlink(), "has no manifest.json"),
        (lambda p: (p / manifests.NAME).write_text("{"), "does not parse"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_taken(tmp_path, caplog, harm, words):
    before, newest = write(tmp_path, 10), write(tmp_path, 20)
    harm(newest)
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path, checksums=True) == before
    assert len(caplog.records) == 1
    assert str(newest) in caplog.text
    assert words in caplog.text


def test_shares_of_the_files_together_find_every_flipped_byte(tmp_path):
    path = write(tmp_path, 1)
    (path / "b").write_bytes(b"weightS")
    found = [damage(path, checksums=True, share=(i, 2)) for i in range(2)]
    assert [problem is None for problem in found] == [True, False]
    assert damage(path) is None  # sizes alone agree


def test_only_complete_ones_count_as_kept(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "step_000003" / "a").unlink()
    write(tmp_path, 4, keep_last=2)
    assert names(tmp_path) == ["step_000002", "step_000003", "step_000004"]
    write(tmp_path, 5, keep_last=1)
    assert names(tmp_path) == ["step_000003", "step_000005"]


def test_the_one_just_written_stays_beside_later_ones_of_an_earlier_attempt(tmp_path):
    for step in (10, 20):
        write(tmp_path, step)
    write(tmp_path, 5, keep_last=2)
    assert names(tmp_path) == ["step_000005", "step_000020"]


def test_one_that_cannot_be_removed_stays_and_the_new_one_counts(tmp_path, monkeypatch, caplog):
    """Of another user, say: the save has worked."""
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name == "step_000001":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return rename(path, target)

    for step in (1, 2):
        write(tmp_path, step)
    monkeypatch.setattr(Path, "rename", refused)
    with caplog.at_level(logging.WARNING):
        write(tmp_path, 3, keep_last=1)
    assert names(tmp_path) == ["step_000001", "step_000003"]
    (record,) = caplog.records
    assert "step_000001" in record.getMessage()


def test_a_file_that_cannot_be_read_is_damage_with_a_place(tmp_path, monkeypatch):
    def broken(checksum: object, path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")  # as of read(), which knows no name

    path = write(tmp_path, 1)
    monkeypatch.setattr(manifests, "add_file", broken)
    assert damage(path, checksums=True) == f"{path}: Input/output error"


def test_leftovers_go_and_other_files_stay(tmp_path):
    stale = commits.make_temporary(tmp_path, 7)
    (stale / "a").write_bytes(b"half")
    (tmp_path / "step_000007.txt").write_text("mine")
    assert latest(tmp_path) is None
    write(tmp_path, 8)
    assert names(tmp_path) == ["step_000007.txt", "step_000008"]


def test_a_step_written_again_replaces_the_old_one(tmp_path):
    write(tmp_path, 1, b"old")
    path = write(tmp_path, 1, b"new")
    assert (path / "a").read_bytes() == b"new"
    assert names(tmp_path) == ["step_000001"]


def test_a_replaced_one_counts_until_its_successor_is_in_place(tmp_path):
    aside = write(tmp_path, 1, b"old").rename(tmp_path / "step_000001.old-abcd")
    commits.remove_leftovers(tmp_path)
    assert latest(tmp_path) == aside
    path = write(tmp_path, 1, b"new")
    assert latest(tmp_path) == path
    assert names(tmp_path) == ["step_000001"]
    aside = path.rename(aside)
    write(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == ["step_000002"]


def test_later_ones_step_aside_when_a_run_goes_another_way(tmp_path):
    for step in (4, 8, 12):
        write(tmp_path, step)
    commits.set_aside(tmp_path, after_step=4)
    assert latest(tmp_path) == tmp_path / "step_000004"
    assert len(names(tmp_path)) == 3, "nothing is removed"
    write(tmp_path, 8, keep_last=1)
    assert latest(tmp_path) == tmp_path / "step_000008"
    assert len(names(tmp_path)) == 3 and names(tmp_path)[0] == "step_000008"


def test_a_replaced_one_stays_while_its_successor_has_wrong_checksums(tmp_path):
    """A run that resumes reads the checksums, and goes on from the one that was replaced."""
    aside = write(tmp_path, 1, b"old").rename(tmp_path / "step_000001.old-abcd")
    path = write(tmp_path / "other", 1, b"new").rename(tmp_path / "step_000001")
    (path / "a").write_bytes(b"nex")
    assert latest(tmp_path, checksums=True) == aside
    commits.remove_leftovers(tmp_path)
    assert latest(tmp_path, checksums=True) == aside
    write(tmp_path, 1, b"own")
    assert [x for x in names(tmp_path) if x != "other"] == ["step_000001"]
