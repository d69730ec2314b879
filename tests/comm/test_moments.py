"""Moments of a device are taken without waiting; whoever asks for a duration waits for its end."""

import time
from types import SimpleNamespace

import pytest
import torch

from tests.streams import Event, Stream
from tests.streams import stream as stream  # a fixture
from torchdistpackage.comm.moments import OnHost, clock_of, seconds


def test_on_the_cpu_a_moment_is_a_reading_of_the_clock():
    now = clock_of(torch.device("cpu"))
    begin = now()
    time.sleep(0.02)
    assert 0.02 <= seconds(begin, now()) < 1


def test_on_a_device_the_time_of_its_stream_counts_and_is_waited_for_when_it_is_read(
    stream: Stream,
):
    now = clock_of(torch.device("cuda"))
    begin = now()
    stream.now_s += 5
    end = now()
    stream.now_s += 100
    assert stream.waits == [], "the host is ahead"
    assert seconds(begin, end) == pytest.approx(5)
    assert stream.waits == [1005], "and waits for that moment alone"


class OnDevice:
    """A tensor in the memory of a device; `copies` notes how it is copied to the host."""

    is_cuda = True

    def __init__(self, values: torch.Tensor):
        self.values, self.copies = values, []

    def to(self, where: str, *, non_blocking: bool = False) -> torch.Tensor:
        self.copies.append((where, non_blocking))
        return self.values.clone()


def test_a_copy_begins_at_once_and_only_its_end_is_waited_for(stream: Stream, monkeypatch):
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Event=lambda: Event(stream)))
    values = OnDevice(torch.tensor([[1.5, 2.0]]))
    copy = OnHost(values)  # type: ignore[arg-type]
    assert values.copies == [("cpu", True)]
    values.values.zero_()  # by a later step
    stream.now_s += 100
    assert not copy.is_there() and stream.waits == []
    assert copy.read() == [[1.5, 2.0]]
    assert stream.waits == [1000], "nothing that was issued later"


def test_on_the_cpu_the_values_are_there():
    copy = OnHost(torch.tensor([1.5, 2.0]))
    assert copy.is_there() and copy.read() == [1.5, 2.0]
