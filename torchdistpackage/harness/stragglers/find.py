"""Find slow ranks from how long each was busy with each phase, and report them. No torch.

A rank is compared with those that do the same work, in the same steps. It is named where it is the
slower one in nearly all of them, by more than that difference varies between steps. A rank without
such peers, as a stage of a lone pipeline, is compared with what the others' times and the cost of
its work let expect.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from torchdistpackage.topology.mesh import Mesh

SPOKEN = {
    "data": "data loading",
    "forward": "the forward",
    "backward": "the backward",
    "optimizer": "the optimizer",
    "reduce": "reducing gradients",
    "save": "saving",
    "validate": "validating",
}
PHASES = ("data", "forward", "backward", "optimizer")
"""Phases in which a rank works."""
COMPARED = (*PHASES, "reduce")
"""Phases of a step that are compared. In others, such as "messages", a rank does little but
wait."""
BETWEEN_STEPS = ("save", "validate")
"""Phases that come between some steps; each time is compared by itself."""

WINDOW = 10
"""Steps that are judged together."""
MIN_STEPS = 8
"""Smallest number of steps from which a rank is named or a cost is measured."""
MIN_TIMES = 3
"""Smallest number of times that a phase between steps came, from which a rank is named."""
STEPS_ALIKE = 0.8
"""Share of the steps that have to agree; the others may be anything."""
MIN_EXCESS_S = 0.005
MIN_OF_STEP, MIN_OF_PHASE = 0.01, 0.05
"""Smallest excess, as shares of a rank's busy step and of the peers' time: machines differ by less
anyway."""
BETWEEN_EXCESS_S, BETWEEN_OF_PHASE = 0.05, 1.0
"""The same for a phase between steps, of which few times are known: at least twice as slow."""
MIN_OF_SPREAD, CLEAR_OF_SPREAD = 1.6, 3.2
"""Smallest excess that is more than chance, and that which one window is enough to report. The unit
is the distance of the difference from its own median in the steps that agree."""

Times = Mapping[str, Sequence[Sequence[float]]]
"""Busy seconds, [phase][rank][step of the window]."""
MOST_SHARE = 10
"""Largest excess, in multiples of the peers' time, that is also given as a percentage."""
ROUGH, CLOSE = 1.0, 0.15
"""Shares of the expected time by which a planned cost may be wrong, and a measured one."""

QUIET_WINDOWS = 2
"""Number of windows without it after which a straggler is over."""
CHANGE = 2.0
"""A straggler whose delay grew or fell by this factor is reported again."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of each rank's work in a phase, for ranks that no other rank does the same work as.

    of_rank: 0 for a rank that is not to be judged. measured: it is the seconds of an earlier
    window, below which no rank is slow; else a plan, in any unit.
    """

    of_rank: Sequence[float]
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that takes `time_s` for a phase of a step where `peers_s` were to be expected.

    clear: this window alone is enough; otherwise the next one should say the same.
    """

    rank: int
    phase: str
    time_s: float
    peers_s: float
    clear: bool = True

    @property
    def excess_s(self) -> float:
        return self.time_s - self.peers_s

    def described(self, mesh: Mesh, hosts: Sequence[str]) -> str:
        """Return a line such as `rank 5 (data 1 pipe 0) on node07: data loading takes 61.0 ms a
        step, its peers 11.0 ms (50.0 ms or 455% more)`. hosts: host of each rank.
        """
        more = f"{1000 * self.excess_s:.1f} ms"
        if self.excess_s <= MOST_SHARE * self.peers_s:
            more += f" or {self.excess_s / self.peers_s:.0%}"
        each = "each time" if self.phase in BETWEEN_STEPS else "a step"
        return (
            f"{self.who(mesh, hosts)}: {self.what} takes {1000 * self.time_s:.1f} ms {each}, its "
            f"peers {1000 * self.peers_s:.1f} ms ({more} more)"
        )

    def who(self, mesh: Mesh, hosts: Sequence[str]) -> str:
        """Return `rank 5 (data 1 pipe 0) on node07`."""
        where = " ".join(f"{axis} {index}" for axis, index in mesh.coord(self.rank).items())
        return f"rank {self.rank} ({where}) on {hosts[self.rank]}"

    @property
    def what(self) -> str:
        return SPOKEN.get(self.phase, self.phase)


def same_work(mesh: Mesh, everywhere: Collection[str] = ()) -> dict[str, list[Sequence[int]]]:
    """Return for each phase the groups of ranks that do the same work: those of one pipe index.

    everywhere: phases in which all ranks do the same work.
    """
    stages = list(mesh.groups(axis for axis in mesh.names if axis != "pipe"))
    return {phase: [range(mesh.size)] if phase in everywhere else stages for phase in SPOKEN}


def find_stragglers(
    times: Times,
    alike: Mapping[str, Sequence[Sequence[int]]],
    costs: Mapping[str, Cost] = MappingProxyType({}),
) -> list[Straggler]:
    """Return ranks that are slow in this window of steps, the worst first.

    alike: see `same_work`. costs: by phase; without, ranks alone in their group are not judged.
    """
    if min(len(row) for rows in times.values() for row in rows) < MIN_STEPS:
        return []
    busy_s = [sum(map(median, of_rank)) for of_rank in zip(*times.values(), strict=True)]
    stragglers: list[Straggler] = []
    for phase, rows in times.items():
        groups = alike[phase]
        for ranks in groups:
            if len(ranks) > 1:
                typical = _typical(rows[rank] for rank in ranks)
                for rank in ranks:
                    stragglers += _judged(rank, phase, rows[rank], typical, busy_s[rank])
        if phase in costs:
            alone = [ranks[0] for ranks in groups if len(ranks) == 1]
            for rank, typical, slack in _expected(alone, rows, costs[phase]):
                stragglers += _judged(rank, phase, rows[rank], typical, busy_s[rank], slack)
    return sorted(stragglers, key=lambda straggler: -straggler.excess_s)


def find_between_steps(
    times: Times, alike: Mapping[str, Sequence[Sequence[int]]]
) -> list[Straggler]:
    """Return ranks that were slow each time that a phase between steps came, the worst first.

    times: [phase][rank][time]; a phase may have come a different number of times.
    """
    stragglers: list[Straggler] = []
    for phase, rows in times.items():
        for ranks in alike[phase] if len(rows[0]) >= MIN_TIMES else ():
            typical = _typical(rows[rank] for rank in ranks)
            peers_s = median(typical)
            for rank in ranks:
                more = sorted(x - y for x, y in zip(rows[rank], typical, strict=True))
                # few times say nothing about how much they vary: nearly each must be too long
                least_s = more[len(more) - math.ceil(STEPS_ALIKE * len(more))]
                if least_s >= max(BETWEEN_EXCESS_S, BETWEEN_OF_PHASE * peers_s):
                    stragglers.append(Straggler(rank, phase, peers_s + median(more), peers_s))
    return sorted(stragglers, key=lambda straggler: -straggler.excess_s)


def measured(
    times: Times, earlier: Mapping[str, Cost], stragglers: Sequence[Straggler]
) -> dict[str, Cost]:
    """Return the mean cost of each phase over all windows, with this window added.

    A phase in which a rank was slow keeps its earlier cost.
    """
    slow = {straggler.phase for straggler in stragglers}
    costs = dict(earlier)
    for phase, rows in times.items():
        if phase not in slow and len(rows[0]) >= MIN_STEPS:
            now = [median(row) for row in rows]
            previous = earlier.get(phase)
            if previous is not None and previous.measured:
                now = [(x + y) / 2 for x, y in zip(previous.of_rank, now, strict=True)]
            costs[phase] = Cost(now, measured=True)
    return costs


def fastest_of(times: Times, groups: Iterable[Sequence[int]], phases: Collection[str]) -> Times:
    """Return `times`, where in `phases` each rank has the times of the fastest of its group.

    For ranks that wait for each other inside these phases where their wait looks like work: the
    fastest one waited least.
    """
    changed = {phase: list(rows) for phase, rows in times.items()}
    for ranks in groups:
        for phase in phases:
            fastest = list(map(min, zip(*(times[phase][r] for r in ranks), strict=True)))
            for rank in ranks:
                changed[phase][rank] = fastest
    return changed


def _typical(rows: Iterable[Sequence[float]]) -> list[float]:
    """Return the lower median of each step, so that of two ranks the faster one counts."""
    return [sorted(column)[(len(column) - 1) // 2] for column in zip(*rows, strict=True)]


def _expected(
    ranks: Sequence[int], rows: Sequence[Sequence[float]], cost: Cost
) -> Iterator[tuple[int, list[float], float]]:
    """Yield (rank, times its steps should take judging by the other ranks, their uncertainty)."""
    of = cost.of_rank
    ranks = [rank for rank in ranks if of[rank] > 0]
    for rank in ranks if len(ranks) > 1 else ():
        typical = _typical([t * of[rank] / of[r] for t in rows[r]] for r in ranks)
        if cost.measured:
            # another one may have been slow then and fast now
            typical = [max(x, of[rank]) for x in typical]
        yield rank, typical, CLOSE if cost.measured else ROUGH


def _judged(
    rank: int,
    phase: str,
    values: Sequence[float],
    typical: Sequence[float],
    busy_s: float,
    slack: float = 0.0,
) -> list[Straggler]:
    """Return the rank as a straggler if its times exceed the typical ones clearly enough, else
    nothing.
    """
    more = [x - y for x, y in zip(values, typical, strict=True)]
    excess_s, peers_s = median(more), median(typical)
    least_s = max(MIN_EXCESS_S, MIN_OF_STEP * busy_s, max(MIN_OF_PHASE, slack) * peers_s)
    if excess_s < least_s:
        return []
    distances = sorted(abs(x - excess_s) for x in more)
    spread_s = distances[math.ceil(STEPS_ALIKE * len(distances)) - 1]
    if excess_s < MIN_OF_SPREAD * spread_s:
        return []
    clear = excess_s >= CLEAR_OF_SPREAD * spread_s
    return [Straggler(rank, phase, peers_s + excess_s, peers_s, clear)]


class Alerts:
    """Reports of stragglers over time: each is reported once, and again when it is over.

    One that is not clear is reported when two windows in a row have found it. hosts: by rank.
    """

    def __init__(self, mesh: Mesh, hosts: Sequence[str]):
        self._mesh, self._hosts = mesh, hosts
        self._reported: dict[tuple[int, str], Straggler] = {}
        self._quiet: dict[tuple[int, str], int] = {}
        self._before: set[tuple[int, str]] = set()

    def alerts(self, stragglers: Sequence[Straggler]) -> list[str]:
        """Return lines about what is new in a window with these `stragglers`."""
        lines: list[str] = []
        now = {(straggler.rank, straggler.phase): straggler for straggler in stragglers}
        for key, straggler in now.items():
            self._quiet[key] = 0
            if (straggler.clear or key in self._before) and self._is_new(straggler):
                self._reported[key] = straggler
                lines.append(f"straggler: {straggler.described(self._mesh, self._hosts)}")
        self._before = set(now)
        for key in [key for key in self._reported if key not in now]:
            self._quiet[key] += 1
            if self._quiet[key] == QUIET_WINDOWS:
                over = self._reported.pop(key)
                who = over.who(self._mesh, self._hosts)
                lines.append(f"straggler over: {who}: {over.what} is as fast as that of its peers")
        return lines

    def _is_new(self, straggler: Straggler) -> bool:
        reported = self._reported.get((straggler.rank, straggler.phase))
        return reported is None or not 1 / CHANGE < straggler.excess_s / reported.excess_s < CHANGE
