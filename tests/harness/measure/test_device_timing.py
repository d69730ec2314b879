"""Times of calls on a device, with stand-ins for its stream and its events."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from torchdistpackage.harness import measure as measuring

CYCLES_PER_S, US = 1e9, 1e-6
LAUNCH_S = 3 * US


@dataclass
class Stream:
    """A host that issues kernels, and a device that runs them in order. Seconds from 0 on."""

    host_s: float = 0.0
    free_s: float = 0.0
    slept_s: list[float] = field(default_factory=list)

    def kernel(self, seconds: float) -> None:
        self.host_s += LAUNCH_S
        self.free_s = max(self.free_s, self.host_s) + seconds

    def sleep(self, cycles: int) -> None:
        self.slept_s.append(cycles / CYCLES_PER_S)
        self.kernel(cycles / CYCLES_PER_S)


@pytest.fixture
def stream(monkeypatch) -> Stream:
    found = Stream()

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            self.at_s = max(found.free_s, found.host_s)

        def query(self) -> bool:
            return found.host_s >= self.at_s

        def synchronize(self) -> None:
            found.host_s = max(found.host_s, self.at_s)

        def elapsed_time(self, end: "Event") -> float:
            return (end.at_s - self.at_s) * 1e3

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", found.sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: found.host_s)
    return found


def call(stream: Stream, issue_s: float, run_s: float) -> Callable[[], None]:
    def go() -> None:
        stream.host_s += issue_s - LAUNCH_S
        stream.kernel(run_s)

    return go


def timed(stream: Stream, issue_s: float, run_s: float, *, warmup: int = 3) -> measuring.CallTimes:
    together = lambda: stream.kernel(5 * US)  # noqa: E731
    calls = [call(stream, issue_s, run_s)]
    cuda = torch.device("cuda")
    (times,) = measuring.in_turns(calls, together, cuda, iterations=4, warmup=warmup)
    return times


@pytest.mark.parametrize("run_s", [4 * US, 40 * US, 0.02])
def test_a_time_is_the_device_s_and_the_launch_stands_apart(stream, run_s):
    times = timed(stream, 60 * US, run_s)
    assert times.seconds == pytest.approx([run_s] * 4)
    assert times.host_s == pytest.approx([60 * US] * 4)


def test_a_host_that_is_slower_than_the_sleep_gets_a_longer_one(stream):
    """1 ms to issue where the sleep is 0.3: longer after each call, until it holds."""
    times = timed(stream, 1000 * US, 4 * US)
    assert times.seconds == pytest.approx([4 * US] * 4)
    assert max(stream.slept_s[2:]) < 5 * 1000 * US
    first = timed(stream, 1000 * US, 4 * US, warmup=0).seconds
    assert first[0] > 500 * US and first[-1] == pytest.approx(4 * US)


def test_a_host_that_is_slower_than_any_sleep_still_ends(stream):
    times = timed(stream, 1.0, 4 * US, warmup=10)
    assert times.seconds[0] > 0.9
    assert max(stream.slept_s[2:]) == pytest.approx(measuring.LONGEST_S)
