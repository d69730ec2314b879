"""A device's work as the host follows it, without stopping it: moments in it, and values out of it.

On the CPU a moment is a reading of the clock. On CUDA it is an event on the current stream, which
passes when the stream gets there. One rule: only `seconds` and `OnHost.read` may wait, and only for
what they read.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


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


class OnHost:
    """A copy in host memory, begun when this is made; nobody waits before it is read.

    Whatever is issued on the stream later is not waited for: copy what a later step will ask for
    as soon as it is computed, before that step is issued.
    """

    def __init__(self, values: Tensor):
        self._values = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def is_there(self) -> bool:
        return self._copied is None or self._copied.query()

    def read(self) -> Any:
        """Numbers, in lists as deep as the tensor; the host waits for the copy if it must."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()
