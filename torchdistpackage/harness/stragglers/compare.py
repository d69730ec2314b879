"""Measure the phases of a rank's steps (data, forward, ...), and find slow ranks.

The clock of a phase stands still while the rank waits for others, so a rank that waits for a slow
one is not slow itself. On a host it is the wall clock less `recorder.waited_s`, and less what the
rank waited for a core (`cpu_wait_clock`).

On CUDA the host only issues work. There an event on the current stream marks each change of phase,
and the time between two of them counts: computation, and what kept the stream idle, such as a host
that was late with the next kernel. What a stream waits for other ranks of a tensor or context group
inside a forward or backward cannot be separated from its work, so there these ranks are judged by
the fastest of them, and named together.

All ranks are compared every few steps, and no rank waits for it: the times of the last steps leave
in one small all-gather and are read a step later by the first rank of the group.
"""

import math
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from types import MappingProxyType

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.moments import Moment, OnHost, TimingEvent, cuda_event, seconds
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.comm.work import Work
from torchdistpackage.errors import TopologyError
from torchdistpackage.harness.stragglers.find import (
    BETWEEN_STEPS,
    COMPARED,
    PHASES,
    WINDOW,
    Alerts,
    Cost,
    fastest_of,
    find_between_steps,
    find_stragglers,
    measured,
    same_work,
)
from torchdistpackage.topology.mesh import Mesh, describe

KEPT = 16
"""Steps whose times are kept."""

CALLBACKS = "callbacks"
"""Phase of what only some ranks do, which is compared with nobody."""

_LOOK_S = 5e-4
"""Longest wait for a core, in seconds, that may be counted as work of the phase it was in."""

Times = dict[str, float]
"""Seconds by phase, of one step."""
Mark = tuple[str, Moment]
"""A phase, and when it began; nothing is added up before somebody asks."""
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
        self.on_device = device is not None and device.type == "cuda"
        """True if the measured time is that of a stream."""
        self._event = event
        self.clock_s = time.monotonic if self.on_device else cpu_wait_clock()
        self.changes: list[tuple[str, float]] | None = None
        """Phases as they begin, each with its time, "" at the end of the last; None: not kept."""
        self.began_s = 0.0
        """Start of the last step, by time.monotonic."""
        self._phases: dict[str, _PhaseContext] = {}
        self._outer: list[str] = []
        self._current = ""
        self._marks: list[Mark] | None = None
        """Marks of the step under way; None between two steps."""
        self._between_marks: list[tuple[str, float]] = []
        self.between_steps = {name: deque[float](maxlen=WINDOW) for name in BETWEEN_STEPS}
        """Seconds of this host for the last times that each of these phases came."""
        self._steps: deque[tuple[int, list[Mark]]] = deque(maxlen=KEPT)

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Count what happens inside the block as `name`."""
        return self._phases.get(name) or self._phases.setdefault(name, _PhaseContext(self, name))

    def begin(self, step: int) -> None:
        """Start `step`; what was counted since the last one ended is dropped.

        From here on waits are measured with the clock of these phases, until the world ends.
        """
        recorder.step, recorder.clock_s = step, self.clock_s
        self._marks = []
        self.began_s = _now_s()

    def end(self) -> None:
        """End the step, as far as this host knows, and keep its times."""
        self._steps.append((recorder.step, self._marks or []))
        self._marks = None

    def kept(self, after: int = 0) -> dict[int, Times]:
        """Return times by step for the kept steps after `after`, without steps that a device has
        not finished.
        """
        return {
            step: _between(marks)
            for step, marks in self._steps
            if step > after
            if not marks or isinstance(end := marks[-1][1], float) or end.query()
        }

    def _go_to(self, name: str) -> None:
        self._current = recorder.phase = name
        if self._marks is not None:
            if self.on_device:
                moment = self._event()
                moment.record()
            else:
                moment = self.clock_s() - recorder.waited_s
            self._marks.append((name, moment))
        else:
            self._note_between(name)
        if self.changes is not None:
            self.changes.append((name, _now_s()))

    def _note_between(self, name: str) -> None:
        """Note a change of phase between two steps; the outermost phase counts its inner ones."""
        marks = self._between_marks
        marks.append((name, self.clock_s() - recorder.waited_s))
        if not name:
            if marks[0][0] in self.between_steps:
                times = _between(marks)
                times.pop(CALLBACKS, None)
                self.between_steps[marks[0][0]].append(sum(times.values()))
            marks.clear()


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


def _between(marks: Sequence[Mark]) -> Times:
    """Return the seconds of each phase from the marks at which phases began."""
    times: Times = {}
    for (name, start), (_, end) in pairwise(marks):
        times[name] = times.get(name, 0.0) + seconds(start, end)
    return times


def cpu_wait_clock() -> Callable[[], float]:
    """Return a clock: seconds of the wall clock less those in which the calling thread waited for a
    core.

    What a rank computes takes as long as it takes; when it gets a core is decided by whatever else
    runs on the host. Linux counts the second for each thread, in nanoseconds. The wall clock alone
    where the system does not count them.
    """
    try:
        return _Running(os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return _now_s


class _Running:
    """Reads one file of three numbers: nanoseconds on a core, in a queue for one, time slices.

    It reads at most once per `_LOOK_S`, as a read costs more than all else in a change of phase.
    """

    def __init__(self, file: int):
        self._file, self._looked_s, self._queued_s = file, 0.0, 0.0
        weakref.finalize(self, os.close, file)

    def __call__(self) -> float:
        now_s = _now_s()
        if now_s - self._looked_s > _LOOK_S:
            self._looked_s = now_s
            try:
                self._queued_s = int(os.pread(self._file, 64, 0).split()[1]) * 1e-9
            except ProcessLookupError:
                self._looked_s = math.inf  # the thread has ended, and someone else asks
        return now_s - self._queued_s


class Comparison:
    """Call it, on every rank, with the number of each step that has ended.

    phases: times of this rank. every: steps between comparisons of the last `WINDOW`; 0 is off.
    everywhere: phases in which all ranks do the same work; in the others those with one pipe
    index do. costs: by phase, of the work of each rank, for stages without such peers; without,
    the first window is the measure. group, mesh: the ranks that are compared and how they lie, by
    default tpc's, or all ranks along one axis.

    Raises:
        TopologyError: mesh and group have different numbers of ranks.
    """

    def __init__(
        self,
        phases: Phases,
        *,
        every: int = WINDOW,
        everywhere: Collection[str] = (),
        costs: Mapping[str, Sequence[float]] = MappingProxyType({}),
        group: Group | None = None,
        mesh: Mesh | None = None,
    ):
        self._phases, self._every = phases, every
        self._group = resolve_group(group, "global")
        if mesh is None:
            ranks_mesh = Mesh((("data", self._group.size()),))
            mesh = tpc.topology.dense if tpc.is_set else ranks_mesh
        if mesh.size != self._group.size():
            raise TopologyError(
                f"a comparison of {self._group.size()} ranks got a mesh of {mesh.size} "
                f"({describe(mesh.axes)}); pass the group and the mesh of the same ranks"
            )
        self._mesh, self._alike = mesh, same_work(mesh, everywhere)
        self._costs = {phase: Cost(of_rank) for phase, of_rank in costs.items()}
        # a stream waits for other ranks inside its reductions, and cannot tell how long
        self._compared = PHASES if phases.on_device else COMPARED
        self._together = list(mesh.groups(("context", "tensor"))) if phases.on_device else []
        self._first: int | None = None
        self._pending: Work | None = None
        self._arrived: OnHost | None = None
        self._alerts: Alerts | None = None

    def __call__(self, step: int) -> list[str]:
        """Return lines about ranks that became slow, or are slow no longer; only the group's first
        rank has some.
        """
        if not self._every or self._group.size() == 1:
            return []
        if self._first is None:
            self._first = step + 1  # the first step warms up
        lines = self._read()
        # a device is still at the step that its host has just issued
        last = step - self._phases.on_device
        if step % self._every == 0 and last >= self._first:
            self._send(range(max(self._first, last - WINDOW + 1), last + 1))
        return lines

    def _send(self, steps: range) -> None:
        """Begin to send all ranks my times of these steps, NaN for what is not known."""
        if self._alerts is None:
            hosts = primitives.collect_objects(socket.gethostname(), self._group) or []
            self._alerts = Alerts(self._mesh, [str(host) for host in hosts])
        times = self._phases.kept()
        of_steps = [times.get(step) for step in steps] + [None] * (WINDOW - len(steps))
        rows = [
            [math.nan if x is None else x.get(p, 0.0) for x in of_steps] for p in self._compared
        ]
        for of_phase in self._phases.between_steps.values():
            rows.append([*of_phase, *[math.nan] * (WINDOW - len(of_phase))])
        # float32 keeps a microsecond of ten seconds, and every back end can send it
        row = torch.tensor([rows], dtype=torch.float32)
        device = primitives.device_of(self._group)
        if device.type == "cuda":
            # from pageable memory the copy would make the host wait for the device
            row = row.pin_memory().to(device, non_blocking=True)
        self._pending = primitives.all_gather(row, self._group, async_op=True)

    def _read(self) -> list[str]:
        """Judge the times that have arrived."""
        if self._pending is not None:
            # it was sent a step ago; on a device this only orders the stream
            table, self._pending = self._pending.wait(), None
            self._arrived = OnHost(table) if self._group.rank() == 0 else None
        if self._arrived is None or not self._arrived.is_there():
            return []
        table, self._arrived = self._arrived.read(), None  # [rank][phase][step]
        assert self._alerts is not None
        times = _complete(table, 0, self._compared)
        between = {
            phase: _complete(table, p, [phase])[phase]
            for p, phase in enumerate(BETWEEN_STEPS, len(self._compared))
        }
        times = fastest_of(times, self._together, ("forward", "backward"))
        stragglers = find_stragglers(times, self._alike, self._costs)
        # no cost of reducing: what a stage without replicas does there is little
        self._costs = measured({x: times[x] for x in PHASES}, self._costs, stragglers)
        return self._alerts.alerts([*stragglers, *find_between_steps(between, self._alike)])


def _complete(
    table: Sequence[Sequence[Sequence[float]]], first: int, phases: Sequence[str]
) -> dict[str, list[list[float]]]:
    """Return [phase][rank][time] of the rows from `first` on, for times that all ranks have."""
    known = [k for k in range(WINDOW) if not any(math.isnan(rank[first][k]) for rank in table)]
    return {
        phase: [[rank[p][k] for k in known] for rank in table]
        for p, phase in enumerate(phases, first)
    }
