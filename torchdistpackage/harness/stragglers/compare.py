"""Compares the phases of all ranks every few steps and says which are slow.

No rank waits for it. The times of the last steps leave in one small all-gather and are
read a step later by the first rank of the group. On CUDA the stream's time in a forward or backward
includes its waits for the other ranks of a tensor or context group, so there these ranks are judged
by the fastest of them, and named together.
"""

import math
import socket
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.moments import OnHost
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.comm.work import Work
from torchdistpackage.errors import TopologyError
from torchdistpackage.harness.stragglers.find import (
    PHASES,
    WINDOW,
    Alerts,
    Cost,
    fastest_of,
    find_stragglers,
    measured,
    same_work,
)
from torchdistpackage.harness.stragglers.phases import Phases
from torchdistpackage.topology.mesh import Mesh, describe


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
            line = Mesh((("data", self._group.size()),))
            mesh = tpc.topology.dense if tpc.is_set else line
        if mesh.size != self._group.size():
            raise TopologyError(
                f"a comparison of {self._group.size()} ranks got a mesh of {mesh.size} "
                f"({describe(mesh.axes)}); pass the group and the mesh of the same ranks"
            )
        self._mesh, self._alike = mesh, same_work(mesh, everywhere)
        self._costs = {phase: Cost(of_rank) for phase, of_rank in costs.items()}
        self._together = list(mesh.groups(("context", "tensor"))) if phases.on_device else []
        self._first: int | None = None
        self._pending: Work | None = None
        self._arrived: OnHost | None = None
        self._alerts: Alerts | None = None

    def __call__(self, step: int) -> list[str]:
        """Lines about ranks found to be slow, or no longer, on the group's first rank."""
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
            hosts = primitives.gather_objects(socket.gethostname(), self._group)
            self._alerts = Alerts(self._mesh, [str(host) for host in hosts])
        kept = self._phases.kept()
        of_steps = [kept.get(step) for step in steps] + [None] * (WINDOW - len(steps))
        rows = [[math.nan if x is None else x.get(p, 0.0) for x in of_steps] for p in PHASES]
        mine = torch.tensor([rows], dtype=torch.float32)
        device = primitives.device_of(self._group)
        if device.type == "cuda":
            # any other memory would have the host wait for what the device is doing
            mine = mine.pin_memory().to(device, non_blocking=True)
        self._pending = primitives.all_gather(mine, self._group, async_op=True)

    def _read(self) -> list[str]:
        """Judge what has arrived."""
        if self._pending is not None:
            table, self._pending = self._pending.wait(), None
            self._arrived = OnHost(table) if self._group.rank() == 0 else None
        if self._arrived is None or not self._arrived.is_there():
            return []
        table, self._arrived = self._arrived.read(), None  # [rank][phase][step]
        assert self._alerts is not None
        known = [k for k in range(WINDOW) if not any(math.isnan(rank[0][k]) for rank in table)]
        times = {
            phase: [[rank[p][k] for k in known] for rank in table] for p, phase in enumerate(PHASES)
        }
        times = fastest_of(times, self._together, ("forward", "backward"))
        found = find_stragglers(times, self._alike, self._costs)
        self._costs = measured(times, self._costs, found)
        return self._alerts.alerts(found)
