"""A start waits for a save that another node made a moment ago, and not for one of its own host."""

import socket
from pathlib import Path

import pytest

from torchdistpackage.launch.run_events import SAVE, START, note_event
from torchdistpackage.train import train_state


@pytest.mark.parametrize(("host", "waits"), [(socket.gethostname(), 0), ("elsewhere", 1)])
def test_a_removed_save_of_this_host_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, waits: int
):
    paths: list[Path] = []
    monkeypatch.setattr(train_state, "appears", lambda path, limit_s: paths.append(path))
    note_event(tmp_path, START, 0, host=host)
    note_event(tmp_path, SAVE, 6)
    assert train_state._await_last_save(tmp_path) == [6]
    assert paths == [tmp_path / "checkpoints" / "step_000006"] * waits
