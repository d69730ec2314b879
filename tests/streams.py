"""A stand-in for the stream of a CUDA device, in time that the test moves."""

import pytest

from torchdistpackage.comm import moments


class Stream:
    """now_s: when the stream ends what has been issued on it so far. waits: moments for which the
    host has waited."""

    def __init__(self) -> None:
        self.now_s, self.waits = 1000.0, list[float]()

    def event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, stream: Stream):
        self._stream = stream

    def record(self) -> None:
        self.at_s = self._stream.now_s

    def query(self) -> bool:
        return self.at_s in self._stream.waits

    def synchronize(self) -> None:
        self._stream.waits.append(self.at_s)

    def elapsed_time(self, end: "Event") -> float:
        assert max(self.at_s, end.at_s) <= max(self._stream.waits), "CUDA raises: not recorded yet"
        return 1000 * (end.at_s - self.at_s)


@pytest.fixture
def stream(monkeypatch) -> Stream:
    """The events that the package makes are those of this one."""
    made = Stream()
    monkeypatch.setattr(moments, "cuda_event", made.event)
    return made
