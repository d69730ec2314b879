"""A device's work as the host follows it, without stopping it: moments in it, and values out of it.

On the CPU a moment is a reading of the clock. On CUDA it is an event on the current stream, which
passes when the stream gets there. Only `seconds` and `OnHost.read` may wait, and only for
what they read.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class TimingEvent(Protocol):
    """The part of `torch.cuda.Event` that is needed."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "TimingEvent") -> float: ...


Moment = float | TimingEvent

_now_s = time.perf_counter


def cuda_event() -> TimingEvent:
    return torch.cuda.Event(enable_timing=True)


def clock_of(device: torch.device) -> Callable[[], Moment]:
    """The function that takes a moment in the work of `device`."""
    return _mark if device.type == "cuda" else time.perf_counter


def seconds(begin: Moment, end: Moment) -> float:
    """Seconds from one moment to a later one; the host waits until the device has passed both."""
    if isinstance(begin, float) or isinstance(end, float):
        return end - begin  # type: ignore[operator]
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def _mark() -> TimingEvent:
    event = cuda_event()
    event.record()
    return event


@dataclass(frozen=True, slots=True)
class Timing:
    """One run: from its first moment to its last, and each piece of computation in it.

    computed: what the CPU's clock has added up already. pieces: those that a device times.
    """

    began: Moment
    ended: Moment
    computed: float
    pieces: Sequence[tuple[Moment, Moment]]

    def computed_s(self) -> float:
        """Seconds of computation. On CUDA this waits for the last of it."""
        # the last one first: nothing is left to wait for after it
        return self.computed + sum(seconds(*piece) for piece in reversed(self.pieces))

    def elapsed_s(self) -> float:
        """Seconds from the start of the run to its end, waits for messages included."""
        return seconds(self.began, self.ended)


class ComputeClock:
    """`with clock:` around each piece of computation, between `restart` and `stop` of each run;
    the device is not stopped to read it."""

    def __init__(self, device: torch.device):
        self.device, self._now = device, clock_of(device)
        self._cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        self._began, self._ended = self._now(), None
        self._computed = 0.0
        self._pieces: list[tuple[Moment, Moment]] = []

    def stop(self) -> None:
        """The run is over as far as this host knows."""
        self._ended = self._now()

    def timing(self) -> Timing:
        """The run since `restart`, to be read when its device has got there."""
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
    """A copy in host memory, begun when this is made; no one waits before it is read.

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
