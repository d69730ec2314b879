"""How long a step computed, when, and how long it took, without stopping the device to ask.

On the CPU readings of the clock; on CUDA pairs of events on the current stream, read only when
somebody wants the numbers.
"""

import time

import torch

_now_s = time.perf_counter


class Clock:
    """Adds up computation: `with clock:` around each piece of it, `restart` at each step."""

    def __init__(self, device: torch.device):
        self.device, self._cuda = device, device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        self._began = _now_s()
        self._ended: float | None = None
        self._computed = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def stop(self) -> None:
        """The step is over as far as this host knows."""
        self._ended = _now_s()

    def __enter__(self) -> None:
        if self._cuda:
            self._pairs.append((mark(), torch.cuda.Event(enable_timing=True)))
        else:
            self._since = _now_s()

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self._pairs[-1][1].record()
        else:
            self._computed += _now_s() - self._since

    def computed_s(self) -> float:
        """Seconds of computation since `restart`. On CUDA this waits for the last of it."""
        if not self._pairs:
            return self._computed
        self._pairs[-1][1].synchronize()
        return sum(start.elapsed_time(end) for start, end in self._pairs) / 1000

    def elapsed_s(self) -> float:
        """Seconds from `restart` to `stop`; on CUDA to the end of the last computation."""
        if self._pairs:
            last = self._pairs[-1][1]
            last.synchronize()
            return self._pairs[0][0].elapsed_time(last) / 1000
        return (self._ended or _now_s()) - self._began


def mark() -> torch.cuda.Event:
    """An event on the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
