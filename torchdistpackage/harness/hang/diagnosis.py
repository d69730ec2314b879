"""Who is to blame for a hang, from what its ranks left. No torch.

One rule: whoever waits is not to blame. The culprits are found at the end of the waits: ranks that
raised, died, stopped or do not answer; then those that do something else while others wait for
them; and if everybody waits, the circle of waits or the calls that do not agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from torchdistpackage.harness.hang.dump import Dump, State, states
from torchdistpackage.harness.hang.flights import from_json as flights_of
from torchdistpackage.harness.hang.flights import met, order_conflict
from torchdistpackage.harness.hang.stacks import innermost, is_waiting, loop_of
from torchdistpackage.harness.hang.waits import (
    RankRecord,
    RankWait,
    aborted,
    blocked_by,
    called,
    cycles,
    format_call,
    numbered,
    ranks_listed,
    waits,
)
from torchdistpackage.launch.failure import Failure, FailureKind, from_json, is_secondary
from torchdistpackage.topology.mesh import Mesh

_DOING = {
    "start": "starting",
    "data": "in data loading",
    "forward": "in its forward pass",
    "backward": "in its backward pass",
    "optimizer": "in the optimizer",
    "save": "saving",
    "validate": "in the validation",
    "messages": "between two messages of its pipeline",
}


_NEVER_CAME = "has never come to its first step, or its folder is another one"


class Cause(IntEnum):
    """What is wrong with a rank, the worst first."""

    RAISED, GONE, LOST, STOPPED, SILENT, LEFT, BUSY, CIRCLE, FOLLOWED = range(9)


@dataclass(frozen=True, slots=True)
class Suspect:
    """A rank to blame: `what` completes "rank 3 ...", `detail` is a stack or a traceback."""

    rank: int
    host: str
    pid: int
    cause: Cause
    what: str
    detail: str = ""


class Hang:
    """What is known of a hang.

    dumps: by rank, of all that have one; stacks: left by the C side of those that do not answer.
    mesh: gives ranks their coordinates. noted: letters of those whose watchers say that they are
    stopped.
    """

    def __init__(
        self,
        world_size: int,
        dumps: Mapping[int, Dump],
        stacks: Mapping[int, str],
        mesh: Mesh | None,
        noted: Mapping[int, str],
    ) -> None:
        self.world_size, self.dumps, self.stacks, self.mesh = world_size, dumps, stacks, mesh
        self.letters = {**noted, **states(dumps)}
        self.hosts = {rank: dump.process.host for rank, dump in dumps.items()}
        answered = {rank for rank, dump in dumps.items() if dump.state is State.DUMPED}
        self.answered = answered
        told = {r: d.snapshot for r, d in dumps.items() if d.answers and d.snapshot is not None}
        records = {rank: RankRecord(snapshot) for rank, snapshot in told.items()}
        self.records = records
        self.waits = waits(records, answered & records.keys())
        self.flights = {r: flights_of(d.flights) for r, d in sorted(dumps.items()) if d.flights}
        self.blocked_by = blocked_by(self.waits)

    # -- who is who --------------------------------------------------------------------

    def who(self, rank: int) -> str:
        """`data 2 pipe 1 tensor 0 on node17`, axes of size 1 left out."""
        name = ""
        if self.mesh is not None and self.mesh.size == self.world_size:
            coord = self.mesh.coord(rank)
            name = " ".join(f"{axis} {coord[axis]}" for axis, size in self.mesh.axes if size > 1)
        host = self.hosts.get(rank)
        return (name or f"rank {rank}") + (f" on {host}" if host else "")

    def describe_rank(self, rank: int) -> str:
        """The same after the number."""
        who = self.who(rank)
        return who if who.startswith("rank ") else f"rank {rank} ({who})"

    def stacks_of(self, rank: int) -> tuple[str, ...]:
        return self.dumps[rank].stacks if rank in self.dumps else ()

    def doing(self, rank: int) -> str:
        """What a rank does that others wait for, in a line."""
        trouble = self.trouble(rank)
        if trouble is not None:
            return trouble.what
        if own := next((w for w in self.waits if w.rank == rank), None):
            return f"itself waits in {format_call(own.call)}"
        place = innermost(self.dumps[rank].stacks)
        return f"is {self._phase(rank)}{f': {place}' if place else ''}"

    def _phase(self, rank: int) -> str:
        snapshot = self.dumps[rank].snapshot or {}
        phase = str(snapshot.get("phase", ""))
        doing = _DOING.get(phase, f"at {phase}" if phase else "in no call of ours")
        if not self._waits_for_device(rank):
            return doing
        return f"waiting for its device{f' {doing}' if phase else ''}"

    def _is_on_device(self, rank: int) -> bool:
        """Whether it issues its calls to one."""
        groups = (self.dumps[rank].snapshot or {}).get("groups", ())
        return any(group["done"] is None for group in groups)

    def _waits(self, rank: int) -> bool:
        return is_waiting(self.stacks_of(rank), on_device=self._is_on_device(rank))

    def _waits_for_device(self, rank: int) -> bool:
        return self._is_on_device(rank) and self._waits(rank)

    def trouble(self, rank: int) -> Suspect | None:
        """What is wrong with a rank that does not train any more, or does not answer."""
        dump = self.dumps.get(rank)
        if dump is None:
            return Suspect(rank, "", 0, Cause.LOST, _NEVER_CAME)
        host, pid = dump.process.host, dump.process.pid
        if dump.state is State.DUMPED:
            return None
        if dump.state is State.LEFT:
            what = f"has ended its loop after {dump.step} steps, and the others have not"
            return Suspect(rank, host, pid, Cause.LEFT, what)
        if dump.state is State.RAISED:
            failure = from_json(dump.error)
            fault = Cause.FOLLOWED if is_secondary(failure) else Cause.RAISED
            what = _raised(failure)
            return Suspect(rank, host, pid, fault, what, failure.detail)
        letter, stack = self.letters.get(rank), self.stacks.get(rank, "").strip()
        at = f", process {pid}"
        if letter is None:
            alone = not any(self.hosts[r] == host for r in self.answered)
            of_all = (
                f": no rank on {host} does, so the host or its network is gone" if alone else ""
            )
            return Suspect(rank, host, pid, Cause.LOST, f"does not answer{of_all}", stack)
        if letter == "":
            crash = stack.startswith("Fatal") and stack.partition("\n")[0]
            ended = f"crashed ({crash})" if crash else "ended without a word, as by a kill"
            gone = f"is gone: its process ({pid}) has {ended}"
            what = aborted(rank, stack, self.records) or gone
            return Suspect(rank, host, pid, Cause.GONE, what, stack if crash else "")
        if letter in "Tt":
            by = "by a debugger" if letter == "t" else "by SIGSTOP or Ctrl-Z"
            what = f"is stopped (process state {letter}{at}), {by}"
            return Suspect(rank, host, pid, Cause.STOPPED, what)
        kind = " in the kernel, at a disk or a driver" if letter == "D" else ""
        why = "a call into C holds it" if stack else "it is held, or cannot write here"
        alive = f"it is alive{kind} (state {letter}{at}), but its interpreter does not run: {why}"
        return Suspect(rank, host, pid, Cause.SILENT, f"does not answer: {alive}", stack)

    # -- who is to blame ---------------------------------------------------------------

    def suspects(self) -> tuple[Suspect, ...]:
        """At least one, the first one to blame first."""
        found = [c for rank in range(self.world_size) if (c := self.trouble(rank)) is not None]
        waiting = {wait.rank for wait in self.waits}
        busy = [r for r in self.blocked_by if r in self.answered and r not in waiting]
        if (crossed := self._crossed()) is not None:
            found.append(crossed)
            busy = [r for r in busy if not self._waits_for_device(r)]
        found += [self._busy(r) for r in sorted(busy, key=lambda r: (-len(self.blocked_by[r]), r))]
        found += [self._circle(circle) for circle in cycles(self.waits)]
        found.sort(key=lambda c: (c.cause, self._since(c)))
        return tuple(found or [self._unexplained()])

    def _since(self, culprit: Suspect) -> float:
        """Of those that raised, the first comes first; the others stay as they are."""
        if culprit.cause not in (Cause.RAISED, Cause.FOLLOWED):
            return 0.0
        return from_json(self.dumps[culprit.rank].error).time_s

    def _of(self, rank: int, fault: Cause, what: str) -> Suspect:
        dump = self.dumps[rank]
        loop = dump.stacks[:1]
        detail = "\n".join([*loop, *({loop_of(dump.stacks)} - {*loop, ""})])
        return Suspect(rank, dump.process.host, dump.process.pid, fault, what, detail)

    def _busy(self, rank: int) -> Suspect:
        num = len(self.blocked_by[rank])
        others = f"{num} other rank{'s wait' if num > 1 else ' waits'} for it"
        return self._of(rank, Cause.BUSY, f"is {self._phase(rank)} while {others}")

    def _circle(self, circle: Sequence[RankWait]) -> Suspect:
        first = next((wait for wait in circle if wait.disagrees), circle[0])
        peer = self.describe_rank(first.behind[0])
        if first.disagrees:
            what = f"and {peer} do not agree on {numbered(first.call)}: {self._versions(first)}"
        elif first.other is not None:
            what = (
                f"and all others are in {numbered(first.call)}, {called(first.call)}, and it does "
                f"not end: look at the network between their hosts, and at arguments that differ, "
                f"which `with comm.checked_calls():` compares"
            )
        else:
            ways = (
                f"rank {wait.rank} waits in {format_call(wait.call)} for rank {wait.behind[0]}"
                for wait in circle
            )
            what = f"and {peer} wait in a circle: {'; '.join(ways)}"
        return self._of(first.rank, Cause.CIRCLE, what)

    def _versions(self, wait: RankWait) -> str:
        """`all_reduce float32[4] (rank 0) against broadcast float32[4] (ranks 1, 2)`."""
        call, ranks = wait.call, dict[str, list[int]]()
        parties = call.ranks if call.peer is None else (wait.rank, call.peer)
        for other in self.waits:
            if numbered(other.call) == numbered(call) and other.rank in parties:
                ranks.setdefault(called(other.call), []).append(other.rank)
        if wait.other is not None:
            ranks.setdefault(called(wait.other), list(wait.behind))
        return " against ".join(f"{what} ({ranks_listed(of)})" for what, of in ranks.items())

    def _unexplained(self) -> Suspect:
        """All answer, and nobody is known to be waited for: then the stacks decide.

        Who stands in a call of others' libraries that waits is not to blame; of the rest, the rank
        whose stack is the rarest.
        """
        waiting = {rank for rank in self.answered if self._waits(rank)}
        if waiting == self.answered and (stuck := self._stuck_devices()) is not None:
            return stuck
        by_stack: dict[str, list[int]] = {}
        for rank in sorted(self.answered - waiting or self.answered):
            by_stack.setdefault(loop_of(self.stacks_of(rank)), []).append(rank)
        num = min(map(len, by_stack.values()))
        first, *alike = sorted(r for ranks in by_stack.values() if len(ranks) == num for r in ranks)
        taken = f"in a step that has taken {self.dumps[first].over_s:.0f} s"
        if not alike:
            return self._of(first, Cause.BUSY, f"is {self._phase(first)}, {taken}")
        phases = {self._phase(rank) for rank in (first, *alike)}
        doing = phases.pop() if len(phases) == 1 else "in different parts of the step"
        if first in waiting:
            doing = "waiting, in calls that are not numbered"
        unknown = "which of them holds up the others cannot be told"
        what = f"and {ranks_listed(alike)} are {doing}, {taken}: {unknown}"
        return self._of(first, Cause.BUSY, what)

    def _crossed(self) -> Suspect | None:
        """Two calls that no device ends, issued in different orders."""
        found = order_conflict(self.flights)
        if found is None or not {found.first, found.second} <= self.answered:
            return None
        what = (
            f"and {self.describe_rank(found.second)} have issued {found.one.words} and "
            f"{found.other.words} in different orders, and no device ends them: issue calls of "
            f"several groups in one order on all ranks"
        )
        return self._of(found.first, Cause.CIRCLE, what)

    def _stuck_devices(self) -> Suspect | None:
        """All wait, and nobody for a rank that is behind: what does not end is on devices."""
        first, *more = sorted(r for r in self.answered if self._is_on_device(r)) or [None]
        if first is None:
            return None
        call = met(self.flights)
        ending = "" if call is None else f", and {call.words} does not end, which all have issued"
        causes = "a kernel that does not end"
        if more:
            causes = f"calls of several groups in different orders, {causes}, the network"
        who = f"and {ranks_listed(more)} wait for their devices" if more else "waits for its device"
        return self._of(first, Cause.CIRCLE, f"{who}{ending}: look for {causes}")


def _raised(failure: Failure) -> str:
    if failure.kind is not FailureKind.EXIT:
        return f"raised {failure.error}"
    return f"left its loop by sys.exit({failure.error or failure.exit_code})"
