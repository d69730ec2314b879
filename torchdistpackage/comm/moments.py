"""Moments in a device's work, taken without waiting for it: durations are read later.

On the CPU a moment is a reading of the clock. On CUDA it is an event on the current stream, which
passes when the stream gets there. One rule: only `seconds` may wait, and only for its later moment.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch


class TimingEvent(Protocol):
    """What is needed of `torch.cuda.Event`."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "TimingEvent") -> float: ...


Moment = float | TimingEvent


def cuda_event() -> TimingEvent:
    return torch.cuda.Event(enable_timing=True)


def clock_of(device: torch.device) -> Callable[[], Moment]:
    """What takes a moment in the work of `device`."""
    return _mark if device.type == "cuda" else time.perf_counter


def seconds(begin: Moment, end: Moment) -> float:
    """From one moment to a later one; the host waits until the device has passed both."""
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin  # type: ignore[operator]
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def _mark() -> TimingEvent:
    event = cuda_event()
    event.record()
    return event
