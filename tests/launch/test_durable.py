"""Files that are there as a whole or not at all."""

import pytest

from torchdistpackage.errors import LaunchError
from torchdistpackage.launch.durable import alone, write_whole


def test_a_file_is_replaced_and_nothing_lies_beside_it(tmp_path):
    path = tmp_path / "new" / "decision.7.0"
    for text in ("requeue after step 3\n", "stop\n"):
        write_whole(path, text)
        assert path.read_text() == text
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_what_cannot_be_written_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "report"
    write_whole(path, "before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "a lone surrogate: \ud800")
    assert path.read_text() == "before" and len(list(tmp_path.iterdir())) == 1


def test_of_two_that_come_at_once_one_is_told_so(tmp_path):
    lock = tmp_path / "new" / ".run.lock"
    with (
        alone(lock, "a submission of run"),
        pytest.raises(LaunchError, match="a submission of run is under way elsewhere"),
        alone(lock, "a submission of run"),
    ):
        pass
    with alone(lock, "a submission of run"):
        assert lock.exists()
    assert list(tmp_path.iterdir()) == [], "nothing is left"
