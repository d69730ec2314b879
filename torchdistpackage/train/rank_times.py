"""Write each rank's step times and memory to `ranks.jsonl`, a row every few steps.

A rank's seconds are those of its phases (harness/stragglers/compare.py), in which it waits for
nobody, and the time for which its host was blocked in calls over each axis. A device queue does not
block the host, so there a phase includes its waits and no axis has any. The numbers of a step leave
in one small all-gather and are read a step later, so no rank waits for it.
"""

import math
import platform
import resource
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.backends import is_queued
from torchdistpackage.comm.group_state import known_states
from torchdistpackage.comm.moments import OnHost
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.comm.work import Work
from torchdistpackage.harness.stragglers.find import PHASES
from torchdistpackage.run_files import RANKS
from torchdistpackage.topology.mesh import Topology
from torchdistpackage.train.loop import Callback, Loop
from torchdistpackage.train.metric_rows import MetricsLog
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.step_stats import PendingStep, StepResult

SEVERAL = "several axes"
"""Name for a group that spans more than one axis, such as all ranks."""
_RANKS_A_ROW = 64
"""Largest number of ranks whose rows are written as often as requested; with more ranks rows are
rarer, or the file of a large run would have gigabytes.
"""
_LETTERS = 6


class RankTimes(Callback):
    """Gathers the ranks' numbers every `every` steps, less often with more than 64 ranks.

    folder: of the run. next_step: rows from it on are dropped, because its steps are repeated.
    """

    def __init__(self, trainer: Trainer, folder: Path, every: int, next_step: int):
        world = trainer.plan.world_size
        self._trainer = trainer
        self._every = every * math.ceil(world / _RANKS_A_ROW)
        self._group = tpc.get_group("global")
        self._device = primitives.device_of(self._group)
        self._waits = AxisWaits(trainer.plan.topology)
        self._last = next_step - 1
        self._begun: list[float] = []
        self._taken = [0.0] * (1 + len(self._waits.axes))
        self._pending: tuple[int, int, Work | OnHost] | None = None
        hosts = primitives.collect_objects(platform.node(), self._group)
        self._log = MetricsLog(folder, next_step - 1, RANKS) if trainer.rank == 0 else None
        self._hosts: Sequence[object] | None = hosts  # written once, with the first row

    def on_begin(self, loop: Loop) -> None:
        """Let unwritable rows end the run only if unwritable rows of `metrics.jsonl` do."""
        if self._log is not None and loop.log.goes_on:
            self._log.say = loop.log.note

    def before_step(self, loop: Loop, step: int) -> None:
        """Exclude the time between steps, such as a validation."""
        if not self._begun or not self._trainer.runs_ahead:
            self._begun = self._now()

    def on_issued(self, loop: Loop, step: int) -> None:
        now = self._now()
        self._taken = [t + b - a for t, a, b in zip(self._taken, self._begun, now, strict=True)]
        self._begun = now
        self._read()
        if step % self._every == 0 or step == self._trainer.num_steps:
            self._send(step)

    def on_step(self, loop: Loop, result: StepResult, issued: PendingStep) -> None:
        if result.votes["stop"]:
            self._read()

    def on_end(self, loop: Loop) -> None:
        """Write the numbers that have arrived."""
        self._read()
        if self._log is not None:
            self._log.close()

    def _send(self, step: int) -> None:
        """Begin to send all ranks my numbers of the steps since the last row."""
        num = step - self._last
        steps = [*self._trainer.phases.kept(after=self._last).values()]
        num_steps = max(len(steps), 1)
        values = [sum(x.get(phase, 0.0) for x in steps) / num_steps for phase in PHASES]
        values += [seconds / num for seconds in self._taken]
        row = torch.tensor([[*values, *memory_bytes(self._trainer.device)]], dtype=torch.float64)
        self._last, self._taken = step, [0.0] * len(self._taken)
        if self._device.type == "cuda":
            # any other memory would have the host wait for what the device is doing
            row = row.pin_memory().to(self._device, non_blocking=True)
        gathered = primitives.all_gather(row, self._group, async_op=True)
        if is_queued(self._group):
            # the copy leaves ahead of the next step, which would else be waited for
            gathered = OnHost(gathered.wait())
        self._pending = step, num, gathered

    def _read(self) -> None:
        if self._pending is None:
            return
        (step, num, sent), self._pending = self._pending, None
        # it was sent a step ago, so this hardly waits
        table = sent if isinstance(sent, OnHost) else OnHost(sent.wait())
        if self._log is None:
            return
        columns = [[_short(x) for x in column] for column in zip(*table.read(), strict=True)]
        phases = dict(zip(PHASES, columns, strict=False))
        time_s, *waits = columns[len(PHASES) : -2]
        current, peak = columns[-2:]
        more = {} if self._hosts is None else {"hosts": self._hosts, "layout": self._layout()}
        self._hosts = None
        self._log.write(
            step,
            steps=num,
            at_s=round(time.time(), 3),
            time_s=time_s,
            phases=phases,
            waits=dict(zip(self._waits.axes, waits, strict=True)),
            memory_bytes=current,
            peak_bytes=peak,
            **more,
        )

    def _now(self) -> list[float]:
        """Return the time, and for how long calls over each axis have blocked this host."""
        return [time.monotonic(), *self._waits.seconds()]

    def _layout(self) -> list[list[object]]:
        axes = self._trainer.plan.topology.dense.axes
        return [[name, size] for name, size in axes]


class AxisWaits:
    """Seconds for which calls over each axis have blocked this host; `axes` names them, with
    `SEVERAL` last."""

    def __init__(self, topology: Topology):
        self._topology = topology
        dense = [name for name, size in topology.dense.axes if size > 1]
        expert = ["expert"] if topology.expert.axis_size("expert") > 1 else []
        self.axes = (*dense, *expert, SEVERAL)
        self._index_of: dict[tuple[str, tuple[int, ...]], int] = {}

    def seconds(self) -> list[float]:
        """Return the totals, in the order of `axes`."""
        totals = [0.0] * len(self.axes)
        for state in known_states():
            key = state.axis, state.ranks
            index = self._index_of.get(key)
            if index is None:
                index = self._index_of[key] = self.axes.index(self._axis(*key))
            totals[index] += state.waited_s
        return totals

    def _axis(self, name: str, ranks: tuple[int, ...]) -> str:
        """Return the axis along which `ranks` lie, or `SEVERAL`. name: name of the group, if it has
        one.
        """
        if name in self.axes:
            return name
        coords = [self._topology.dense.coord(rank) for rank in ranks]
        along = [axis for axis in coords[0] if len({x[axis] for x in coords}) > 1]
        return along[0] if len(along) == 1 else SEVERAL


def memory_bytes(device: torch.device) -> tuple[float, float]:
    """Return the memory that this rank uses, and its peak: GPU memory on a GPU, else the
    process's.
    """
    if device.type == "cuda":
        current, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        return float(current), float(peak)
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB on Linux
    current = pages * resource.getpagesize()
    return float(current), float(max(current, peak))


def _short(value: float) -> float:
    """Return a number with six digits, more than any measurement has."""
    return float(f"{value:.{_LETTERS}g}") if math.isfinite(value) else value
