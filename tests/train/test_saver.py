"""Which copies a save may overwrite while another one is written. No ranks."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchdistpackage.train import saving
from torchdistpackage.train.saving import RunSaver, _short_host
from torchdistpackage.train.train_state import TrainState


class Pending(SimpleNamespace):
    """A save that is written until it is awaited."""


def saver_with_failed_local_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> tuple[RunSaver, list[str]]:
    events: list[str] = []

    def begin(trainer: Any, state: TrainState, target: Any, copies: Any) -> Any:
        kind = "local" if target is local else "shared"
        events.append(f"{kind} {state.step} copies")
        return Pending(step=state.step)

    def flush(slot: Any) -> None:
        if slot.pending is not None:
            events.append(f"{slot._name} {slot.pending.step} written")
            slot.pending = None

    local: Any = SimpleNamespace()
    monkeypatch.setattr(saving, "begin_save", begin)
    monkeypatch.setattr(saving.SaveSlot, "flush", flush)
    trainer: Any = SimpleNamespace(update=SimpleNamespace(before_step=None))
    saver = RunSaver(trainer, tmp_path, mode="async", local=local)
    saver.owes = True  # a local copy that was to go to the run folder has failed
    return saver, events


def test_a_local_copy_waits_for_a_save_that_still_reads_the_same_memory(monkeypatch, tmp_path):
    saver, events = saver_with_failed_local_copy(monkeypatch, tmp_path)
    saver.save(TrainState(step=10))
    saver.save_locally(TrainState(step=11))
    assert events == ["shared 10 copies", "save 10 written", "local 11 copies"]


def test_the_first_host_whose_ranks_copy_too_much_is_named():
    ranks = [("a", 3, 100), ("b", 30, 100), ("b", 30, 100)]
    assert _short_host(ranks) == ("b", 60, 100)
    assert _short_host(ranks[:2]) is None
