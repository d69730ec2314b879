"""Files that are there as a whole or not at all."""

import pytest

from torchdistpackage.launch.durable import write_whole


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
