"""Times and values of a device's work, read by the host without stopping the device.

On the CPU a moment is a reading of the clock. On CUDA it is an event on the current stream, reached
when the stream gets there. Only `seconds` and `OnHost.read` may wait, and only for the values that
they return.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class TimingEvent(Protocol):
    """The methods of `torch.cuda.Event` that this file uses."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "TimingEvent") -> float: ...


Moment = float | TimingEvent

_now_s = time.perf_counter


def cuda_event() -> TimingEvent:
    """Return a CUDA event that can be timed."""
    return torch.cuda.Event(enable_timing=True)


def clock_of(device: torch.device) -> Callable[[], Moment]:
    """Return the function that takes a moment in the work of `device`."""
    return _mark if device.type == "cuda" else time.perf_counter


def seconds(begin: Moment, end: Moment) -> float:
    """Return the seconds between two moments; the host waits until the device has reached both."""
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin  # type: ignore[operator]
    end.synchronize()  # elapsed_time raises for an event that has not passed
    return begin.elapsed_time(end) / 1000


def _mark() -> TimingEvent:
    """Record a CUDA event on the current stream."""
    event = cuda_event()
    event.record()
    return event


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of one run: its first and last moment, and the durations of its computations.

    computed: seconds summed from the CPU's clock. pieces: computations timed on a device.
    """

    began: Moment
    ended: Moment
    computed: float
    pieces: Sequence[tuple[Moment, Moment]]

    def computed_s(self) -> float:
        """Return the seconds of computation; on CUDA this waits for the last computation."""
        # the last piece first, so that there is only one wait
        return self.computed + sum(seconds(*piece) for piece in reversed(self.pieces))

    def elapsed_s(self) -> float:
        """Return the seconds from the start of the run to its end, with waits for messages."""
        return seconds(self.began, self.ended)


class ComputeClock:
    """A clock for the computations of a run that does not stop the device.

    Use `with clock:` around each computation, between `restart` and `stop` of each run.
    """

    def __init__(self, device: torch.device):
        self.device, self._now = device, clock_of(device)
        self._cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        self._began, self._ended = self._now(), None
        self._computed = 0.0
        self._pieces: list[tuple[Moment, Moment]] = []

    def stop(self) -> None:
        """Note the end of the run, on the current stream."""
        self._ended = self._now()

    def timing(self) -> Timing:
        """Return the times of the run since `restart`; reading them may wait for the device."""
        ended = self._now() if self._ended is None else self._ended
        return Timing(self._began, ended, self._computed, self._pieces)

    def __enter__(self) -> None:
        self._since = self._now() if self._cuda else _now_s()

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self._pieces.append((self._since, self._now()))
        else:
            self._computed += _now_s() - self._since


class OnHost:
    """A copy to host memory that starts now; only `read` waits for it.

    `read` does not wait for work issued later on the stream. So copy values as soon as they are
    computed, before the next step is issued.
    """

    def __init__(self, values: Tensor):
        self._values = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def is_there(self) -> bool:
        """Return whether the copy has arrived."""
        return self._copied is None or self._copied.query()

    def read(self) -> Any:
        """Return the numbers, as lists nested like the tensor; the host waits for the copy."""
        if self._copied is not None:
            # the copy to pinned memory is asynchronous; reading it earlier would give old numbers
            self._copied.synchronize()
        return self._values.tolist()
