"""How long a step computed and how long it took, without stopping the device to ask.

On the CPU two readings of the clock; on CUDA a pair of events on the stream around each
computation, read only when somebody wants the number.
"""

import time

import torch


class Clock:
    """Adds up computation. `with clock:` around each piece of work, `restart` at each step."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self.restart()

    def restart(self) -> None:
        self._began = time.perf_counter()
        self._ended: float | None = None
        self._computed = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def stop(self) -> None:
        """The step is over as far as this host knows."""
        self._ended = time.perf_counter()

    def __enter__(self) -> None:
        if self._cuda:
            start = torch.cuda.Event(enable_timing=True)
            start.record()
            self._pairs.append((start, torch.cuda.Event(enable_timing=True)))
        else:
            self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self._pairs[-1][1].record()
        else:
            self._computed += time.perf_counter() - self._since

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
        return (self._ended or time.perf_counter()) - self._began
