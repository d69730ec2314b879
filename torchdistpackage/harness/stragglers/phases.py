"""What a rank does in a step, and for how long it is busy with it: data, forward, backward, ...

The clock of a phase stands still while the rank waits for others, so a rank that waits for a slow
one is not slow itself. On a host it is the wall clock less `recorder.waited_s`, and less what the
rank waited for a core (`cpu_wait_clock`).

On CUDA the host only issues work. There an event on the current stream marks each change of phase,
and the time between two of them counts: computation, and what kept the stream idle, such as a host
that was late with the next kernel. What a stream waits for other ranks inside a phase cannot be
told from its own work there; `compare` says what follows.
"""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise

import torch

from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.moments import TimingEvent, cuda_event

KEPT = 16
"""Steps whose times are kept."""

Times = dict[str, float]
"""Seconds by phase, of one step."""
_now_s = time.monotonic


class Phases:
    """Times of the phases of each step of this rank.

    `begin(step)`, then any number of `with phases("forward"):`, then `end()`. A phase may come
    many times in a step, which adds up, and inside another, which does not count its time. Also
    gives a hang report (`recorder.phase`, `recorder.step`) what the rank was at.

    device: where the work is done; the CPU without. event: makes a mark on the stream.
    clock_s: of this host; on a CPU of the thread that made this.
    """

    def __init__(
        self, device: torch.device | None = None, event: Callable[[], TimingEvent] = cuda_event
    ):
        on_cuda = device is not None and device.type == "cuda"
        self._event = event if on_cuda else None
        self.clock_s = time.monotonic if on_cuda else cpu_wait_clock()
        self.changes: list[tuple[str, float]] | None = None
        """A list to note each phase in with the time it began at, "" after the last; or None."""
        self.began_s = 0.0
        """When the last step began, by time.monotonic."""
        self._phases: dict[str, _PhaseContext] = {}
        self._outer: list[str] = []
        self._current = ""
        self._since_s = 0.0
        self._totals: Times = {}
        self._marks: list[tuple[str, TimingEvent]] = []
        self._steps: deque[tuple[int, Times, list[tuple[str, TimingEvent]]]] = deque(maxlen=KEPT)

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Count what happens inside the block as `name`."""
        return self._phases.get(name) or self._phases.setdefault(name, _PhaseContext(self, name))

    def begin(self, step: int) -> None:
        """Start `step`; what was counted since the last one ended is dropped.

        From here on waits are measured with the clock of these phases, until the world ends.
        """
        recorder.step, recorder.clock_s = step, self.clock_s
        self._totals, self._marks = {}, []
        self.began_s = _now_s()

    def end(self) -> None:
        """The step is over as far as this host knows, and its times are kept."""
        self._steps.append((recorder.step, self._totals, self._marks))
        self._totals, self._marks = {}, []

    @property
    def on_device(self) -> bool:
        """Whether what is measured is the time of a stream."""
        return self._event is not None

    def kept(self) -> dict[int, Times]:
        """Times of the last steps, by step, but for those that a device is still at."""
        return {
            step: _between(marks) if marks else times
            for step, times, marks in self._steps
            if not marks or marks[-1][1].query()
        }

    def _go_to(self, name: str) -> None:
        now_s = self.clock_s() - recorder.waited_s
        current = self._current
        self._totals[current] = self._totals.get(current, 0.0) + now_s - self._since_s
        self._current = recorder.phase = name
        self._since_s = now_s
        if self.changes is not None:
            self.changes.append((name, _now_s()))
        if self._event is not None:
            event = self._event()
            event.record()
            self._marks.append((name, event))


class _PhaseContext:
    """`with` one of these its phase is the current one."""

    __slots__ = ("_name", "_phases")

    def __init__(self, phases: Phases, name: str):
        self._phases, self._name = phases, name

    def __enter__(self) -> None:
        phases = self._phases
        phases._outer.append(phases._current)
        phases._go_to(self._name)

    def __exit__(self, *_: object) -> None:
        phases = self._phases
        phases._go_to(phases._outer.pop())


def _between(marks: list[tuple[str, TimingEvent]]) -> Times:
    """Seconds by phase from the marks at which each began."""
    times: Times = {}
    for (name, start), (_, end) in pairwise(marks):
        times[name] = times.get(name, 0.0) + start.elapsed_time(end) / 1000
    return times


def cpu_wait_clock() -> Callable[[], float]:
    """Seconds of the wall clock less those in which the calling thread waited for a core.

    What a rank computes takes as long as it takes; when it gets a core is decided by whatever else
    runs on the host. Linux counts the second for each thread, in nanoseconds. The wall clock alone
    where the system does not count them.
    """
    try:
        return _Running(os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return _now_s


class _Running:
    """Reads one file of three numbers: nanoseconds on a core, in a queue for one, time slices."""

    def __init__(self, file: int):
        self._file = file
        weakref.finalize(self, os.close, file)

    def __call__(self) -> float:
        try:
            return _now_s() - int(os.pread(self._file, 64, 0).split()[1]) * 1e-9
        except ProcessLookupError:
            return _now_s()  # the thread has ended, and someone else asks
