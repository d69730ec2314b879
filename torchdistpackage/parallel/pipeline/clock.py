"""How long a run computed, and how long it took, without stopping the device to ask."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchdistpackage.comm.moments import Moment, clock_of, seconds

_now_s = time.perf_counter


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
    """`with clock:` around each piece of computation, between `restart` and `stop` of each run."""

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
