"""Find the rank that caused a hang from the dumps of all ranks, and write the report. No torch.

A rank that waits is not to blame. The culprits are found at the end of the waits: ranks
that raised, died, stopped or do not answer; then those that do something else while others wait for
them; and if all wait, the circle of waits or the calls that do not agree.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from torchdistpackage.environment.failure import Failure, FailureKind, from_json, is_secondary
from torchdistpackage.harness.hang import flights
from torchdistpackage.harness.hang.dump import Dump, State, states
from torchdistpackage.harness.hang.stacks import innermost, is_waiting, loop_of
from torchdistpackage.harness.hang.waits import (
    RankRecord,
    RankWait,
    RecordedCall,
    aborted,
    blocked_by,
    cycles,
    grouped,
    versions,
    waits,
)
from torchdistpackage.text import SHOWN_RANKS, ranks_listed
from torchdistpackage.topology.mesh import Topology

_DOING = {
    "start": "starting",
    "data": "in data loading",
    "forward": "in its forward pass",
    "backward": "in its backward pass",
    "optimizer": "in the optimizer",
    "save": "saving",
    "validate": "in the validation",
    "generate": "generating text",
    "messages": "between two messages of its pipeline",
}


class Cause(IntEnum):
    """Kinds of faults of a rank, the worst first."""

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


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The culprits, the first one to blame first; `text` is the report."""

    suspects: tuple[Suspect, ...]
    text: str

    def failure(self, time_s: float) -> Failure:
        """Return the failure of the first culprit, for a supervisor. time_s: time of the alarm."""
        first = self.suspects[0]
        return Failure(
            first.rank, first.host, first.pid, time_s, FailureKind.HUNG, 1, first.what, self.text
        )


def diagnose(
    world_size: int,
    dumps: Mapping[int, Dump],
    stacks: Mapping[int, str] | None = None,
    *,
    topology: Topology | None = None,
    noted: Mapping[int, str] | None = None,
) -> Diagnosis:
    """Return the culprits of a hang and the report.

    dumps: by rank, of all that have one. stacks: left by the C side of those that do not answer.
    topology: gives ranks their coordinates. noted: letters of those whose watchers say that they
    are stopped.
    """
    hang = Hang(world_size, dumps, stacks or {}, topology, noted or {})
    suspects = hang.suspects()
    return Diagnosis(suspects, hang.report(suspects))


class Hang:
    """All facts about a hang; `diagnose` makes the report from them."""

    def __init__(
        self,
        world_size: int,
        dumps: Mapping[int, Dump],
        stacks: Mapping[int, str],
        topology: Topology | None,
        noted: Mapping[int, str],
    ) -> None:
        self.world_size, self.dumps, self.stacks = world_size, dumps, stacks
        fits = topology is not None and topology.world_size == world_size
        self.topology = topology if fits else None
        self.letters = {**noted, **states(dumps)}
        self.hosts = {rank: dump.process.host for rank, dump in dumps.items()}
        self.answered = {rank for rank, dump in dumps.items() if dump.state is State.DUMPED}
        self.records = {
            rank: RankRecord(dump.snapshot)
            for rank, dump in dumps.items()
            if dump.answers and dump.snapshot is not None
        }
        self.waits = waits(self.records, self.answered & self.records.keys())
        self.waiting = {wait.rank: wait for wait in reversed(self.waits)}
        self.blocked_by = blocked_by(self.waits)
        of = {r: d.flights for r, d in sorted(dumps.items()) if d.flights}
        self.flights = {rank: flights.from_json(each) for rank, each in of.items()}

    # -- a rank in words ---------------------------------------------------------------

    def who(self, rank: int) -> str:
        """Return `data 2 pipe 1 tensor 0 on node17`, without axes of size 1."""
        name = ""
        if self.topology is not None:
            name = " ".join(f"{axis} {i}" for axis, i in self.topology.place(rank).items())
        host = self.hosts.get(rank)
        return (name or f"rank {rank}") + (f" on {host}" if host else "")

    def describe_rank(self, rank: int) -> str:
        """Return the rank number followed by `who`."""
        who = self.who(rank)
        return who if who.startswith("rank ") else f"rank {rank} ({who})"

    def _doing(self, rank: int) -> str:
        """Return one line on what a rank does while others wait for it."""
        if (trouble := self._trouble(rank)) is not None:
            return trouble.what
        if own_wait := self.waiting.get(rank):
            return f"itself waits in {own_wait.call}"
        location = innermost(self.dumps[rank].stacks)
        return f"is {self._phase(rank)}{f': {location}' if location else ''}"

    def _phase(self, rank: int) -> str:
        phase = str((self.dumps[rank].snapshot or {}).get("phase", ""))
        doing = _DOING.get(phase, f"at {phase}" if phase else "in no call of ours")
        if not self._waits_for_device(rank):
            return doing
        return f"waiting for its device{f' {doing}' if phase else ''}"

    def _is_on_device(self, rank: int) -> bool:
        return rank in self.records and self.records[rank].on_device

    def _is_waiting(self, rank: int) -> bool:
        return is_waiting(self.dumps[rank].stacks, on_device=self._is_on_device(rank))

    def _waits_for_device(self, rank: int) -> bool:
        return self._is_on_device(rank) and self._is_waiting(rank)

    # -- who is to blame ---------------------------------------------------------------

    def suspects(self) -> tuple[Suspect, ...]:
        """Return at least one suspect, the most likely culprit first."""
        troubled = [c for rank in range(self.world_size) if (c := self._trouble(rank)) is not None]
        busy = self.answered & self.blocked_by.keys() - self.waiting.keys()
        if (crossed := self._crossed()) is not None:
            troubled.append(crossed)
            busy = {r for r in busy if not self._waits_for_device(r)}
        for rank in sorted(busy, key=lambda r: (-len(self.blocked_by[r]), r)):
            num = len(self.blocked_by[rank])
            others = f"{num} other rank{'s wait' if num > 1 else ' waits'} for it"
            troubled.append(self._of(rank, Cause.BUSY, f"is {self._phase(rank)} while {others}"))
        troubled += [self._circle(circle) for circle in cycles(self.waits)]
        troubled.sort(key=lambda c: (c.cause, self._since(c)))
        return tuple(troubled or [self._unexplained()])

    def _since(self, culprit: Suspect) -> float:
        """Return the sort key of suspects: those that raised are ordered by time, the others stay
        in place.
        """
        if culprit.cause not in (Cause.RAISED, Cause.FOLLOWED):
            return 0.0
        return from_json(self.dumps[culprit.rank].error).time_s

    def _of(self, rank: int, cause: Cause, call: str) -> Suspect:
        """Return a suspect for a rank that answers, with its stacks."""
        dump = self.dumps[rank]
        loop = dump.stacks[:1]
        detail = "\n".join([*loop, *({loop_of(dump.stacks)} - {*loop, ""})])
        return Suspect(rank, dump.process.host, dump.process.pid, cause, call, detail)

    def _trouble(self, rank: int) -> Suspect | None:
        """Return the problem of a rank that no longer trains or does not answer."""
        dump = self.dumps.get(rank)
        if dump is None:
            fault = "has never come to its first step, or its folder is another one"
            return Suspect(rank, "", 0, Cause.LOST, fault)
        if dump.network:
            host, pid = dump.process.host, dump.process.pid
            return Suspect(rank, host, pid, Cause.LOST, f"is cut off: {dump.network}")
        if dump.state is State.DUMPED:
            return None
        if dump.state is State.LEFT:
            fault = f"has ended its loop after {dump.step} steps, and the others have not"
            cause, detail = Cause.LEFT, ""
        elif dump.state is State.RAISED:
            failure = from_json(dump.error)
            cause = Cause.FOLLOWED if is_secondary(failure) else Cause.RAISED
            fault, detail = f"raised {failure.error}", failure.detail
            if failure.kind is FailureKind.EXIT:
                fault = f"left its loop by {failure.error or f'sys.exit({failure.exit_code})'}"
        else:
            cause, fault, detail = self._silent(rank, dump)
        return Suspect(rank, dump.process.host, dump.process.pid, cause, fault, detail)

    def _silent(self, rank: int, dump: Dump) -> tuple[Cause, str, str]:
        letter, stack = self.letters.get(rank), self.stacks.get(rank, "").strip()
        host, at = dump.process.host, f", process {dump.process.pid}"
        if letter is None:
            fault = "does not answer"
            if host not in {self.hosts[r] for r in self.answered}:
                fault += f": no rank on {host} does, so the host or its network is gone"
            return Cause.LOST, fault, stack
        if letter == "":
            crash = stack.startswith("Fatal") and stack.partition("\n")[0]
            ended = f"crashed ({crash})" if crash else "ended without a word, as by a kill"
            gone = f"is gone: its process ({dump.process.pid}) has {ended}"
            return Cause.GONE, aborted(rank, stack, self.records) or gone, stack if crash else ""
        if letter in "Tt":
            by = "by a debugger" if letter == "t" else "by SIGSTOP or Ctrl-Z"
            return Cause.STOPPED, f"is stopped (process state {letter}{at}), {by}", ""
        kind = " in the kernel, at a disk or a driver" if letter == "D" else ""
        why = "a call into C holds it" if stack else "it is held, or cannot write here"
        alive = f"it is alive{kind} (state {letter}{at}), but its interpreter does not run: {why}"
        return Cause.SILENT, f"does not answer: {alive}", stack

    def _circle(self, circle: Sequence[RankWait]) -> Suspect:
        first = max(circle, key=lambda wait: wait.disagrees)
        peer, call = self.describe_rank(first.behind[0]), first.call
        if first.disagrees:
            calls = self._calls_met(first)
            fault = f"do not agree on {call.numbered}: {' against '.join(versions(calls))}"
            if (odd := _odd(calls)) is not None:
                others = ranks_listed(sorted({r for _, r in calls} - {odd}))
                return self._of(odd, Cause.CIRCLE, f"and {others} {fault}")
            fault = f"and {peer} {fault}"
        elif first.other is not None:
            fault = (
                f"and all others are in {call.numbered}, {call.called}, and it does "
                f"not end: look at the network between their hosts, and at arguments that differ, "
                f"which `with comm.checked_calls():` compares"
            )
        else:
            for calls in (self._calls_met(w) for w in circle if w.call.peer is None):
                # some have come, and one of them with another call
                if (odd := _odd(calls)) is not None:
                    others = ranks_listed(sorted({r for _, r in calls} - {odd}))
                    met = f"do not agree on {calls[0][0].numbered}: "
                    fault = f"and {others} {met}{' against '.join(versions(calls))}"
                    return self._of(odd, Cause.CIRCLE, fault)
            # a collective in which nobody else is, while the others wait in their own calls
            alone = [w for w in circle if w.call.peer is None and _is_alone(w)]
            if len(alone) == 1:
                first = alone[0]
                peer = self.describe_rank(first.behind[0])
            ways = (f"rank {w.rank} waits in {w.call} for rank {w.behind[0]}" for w in circle)
            fault = f"and {peer} wait in a circle: {'; '.join(ways)}"
        return self._of(first.rank, Cause.CIRCLE, fault)

    def _calls_met(self, wait: RankWait) -> list[tuple[RecordedCall, int]]:
        """Return the calls that meet in the one of `wait`, each with its rank."""
        call = wait.call
        parties = call.ranks if call.peer is None else (wait.rank, call.peer)
        waiting = [
            (other.call, other.rank)
            for other in self.waits
            if other.call.numbered == call.numbered and other.rank in parties
        ]
        if wait.other is not None and wait.other.called not in {each.called for each, _ in waiting}:
            waiting += [(wait.other, rank) for rank in wait.behind]
        return waiting

    def _unexplained(self) -> Suspect:
        """Return a suspect by the stacks, if all ranks answer and no rank is known to be waited
        for.

        A rank that waits in a library's call is not to blame. Of the others, the rank with the
        rarest stack is suspected.
        """
        waiting = {rank for rank in self.answered if self._is_waiting(rank)}
        if waiting == self.answered and (stuck := self._stuck_devices()) is not None:
            return stuck
        unexplained = sorted(self.answered - waiting or self.answered)
        by_stack = grouped((loop_of(self.dumps[rank].stacks), rank) for rank in unexplained)
        num = min(map(len, by_stack.values()))
        first, *more = sorted(r for ranks in by_stack.values() if len(ranks) == num for r in ranks)
        duration_text = f"in a step that has taken {self.dumps[first].over_s:.0f} s"
        if not more:
            return self._of(first, Cause.BUSY, f"is {self._phase(first)}, {duration_text}")
        phases = {self._phase(rank) for rank in (first, *more)}
        doing = phases.pop() if len(phases) == 1 else "in different parts of the step"
        if first in waiting:
            doing = "waiting, in calls that are not numbered"
        unknown = "which of them delays the others is not known"
        fault = f"and {ranks_listed(more)} are {doing}, {duration_text}: {unknown}"
        return self._of(first, Cause.BUSY, fault)

    def _crossed(self) -> Suspect | None:
        """Return a fault for two calls in different orders that no device can finish."""
        conflict = flights.order_conflict(self.flights)
        if conflict is None or not {conflict.first, conflict.second} <= self.answered:
            return None
        fault = (
            f"and {self.describe_rank(conflict.second)} have issued {conflict.one} and "
            f"{conflict.other} in different orders, and no device ends them: issue calls of "
            "several groups in one order on all ranks"
        )
        return self._of(conflict.first, Cause.CIRCLE, fault)

    def _stuck_devices(self) -> Suspect | None:
        """Return a suspect if all ranks wait and none is behind: then calls on devices do not
        end.
        """
        first, *more = sorted(r for r in self.answered if self._is_on_device(r)) or [None]
        if first is None:
            return None
        call = flights.met(self.flights)
        ending = "" if call is None else f", and {call} does not end, which all have issued"
        causes = "a kernel that does not end"
        if more:
            causes = f"calls of several groups in different orders, {causes}, the network"
        who = f"and {ranks_listed(more)} wait for their devices" if more else "waits for its device"
        return self._of(first, Cause.CIRCLE, f"{who}{ending}: look for {causes}")

    # -- the report --------------------------------------------------------------------

    def report(self, culprits: Sequence[Suspect]) -> str:
        """Return the report. Its first lines name the culprits; ranks with the same text are
        grouped.
        """
        # without those that failed because others had, unless there are no others
        blamed = [c for c in culprits if c.cause is not Cause.FOLLOWED] or culprits[:1]
        parts = [
            *self._heads(culprits, blamed),
            *(f"rank {c.rank}:\n{_indented(c.detail)}" for c in blamed[:SHOWN_RANKS] if c.detail),
            *_section("who waits for whom:", self._waiting()),
            *_section("not in it:", self._others()),
            *_section("on the devices:", flights.lines(self.flights, SHOWN_RANKS)),
            *_section("stacks:", self._stacks(culprits, blamed)),
        ]
        return "\n".join(parts)

    def _heads(self, culprits: Sequence[Suspect], blamed: Sequence[Suspect]) -> list[str]:
        heads = [f"{self.describe_rank(c.rank)} {c.what}" for c in blamed[:SHOWN_RANKS]]
        if len(blamed) > SHOWN_RANKS:
            heads.append(f"and {ranks_listed([c.rank for c in blamed[SHOWN_RANKS:]])} as well")
        if followers := [c.rank for c in culprits if c not in blamed]:
            heads.append(
                f"then {ranks_listed(followers)} raised what the loss of a peer brings about"
            )
        lines = ["hang: " + "\n      ".join(heads)]
        longest = max(self.dumps.values(), key=lambda dump: dump.over_s, default=None)
        if longest is not None and longest.over_s > longest.limit_s:
            taken_s, limit_s = longest.over_s, longest.limit_s
            lines.append(f"the longest step has taken {taken_s:.1f} s, and may take {limit_s:g} s")
        return lines

    def _waiting(self) -> list[str]:
        """Return the lines that say which rank waits for which."""
        by_text: dict[tuple[object, ...], list[RankWait]] = {}
        for wait in self.waits:
            call = wait.call
            own_rank = wait.rank if call.peer is not None or wait.other else -1
            key = (own_rank, call.group, call.operation, call.sequence, wait.behind)
            by_text.setdefault(key, []).append(wait)
        lines: list[str] = []
        for first, *more in by_text.values():
            lines.append(f"{self.who(first.rank)} waits in {first.call}{self._for_whom(first)}")
            lines.append(f"  (rank {first.rank}: {first.call.exactly})")
            if more:
                do = "do" if len(more) > 1 else "does"
                lines.append(f"  so {do} {ranks_listed([wait.rank for wait in more])}")
        return lines

    def _for_whom(self, wait: RankWait) -> str:
        if not wait.behind:
            return ", in which all others have been"
        role = {"receive": "its sender ", "send": "its receiver "}.get(wait.call.operation, "")
        if wait.other is not None and wait.disagrees:
            return f"; there {role}{self.who(wait.behind[0])} is in {wait.other.called}"
        issued_by = dict(zip(wait.behind, wait.issued or [-1] * len(wait.behind), strict=True))
        behind = sorted(wait.behind, key=lambda rank: rank in self.waiting)
        phrases: list[str] = []
        for rank in behind[:SHOWN_RANKS]:
            issued = issued_by[rank]
            count = f", which has issued {issued}," if issued >= 0 and not role else ""
            phrases.append(f"{role}{self.who(rank)}{count} {self._doing(rank)}")
        if len(behind) > SHOWN_RANKS:
            phrases.append(f"and {ranks_listed(behind[SHOWN_RANKS:])}")
        return "; " + "; ".join(phrases)

    def _others(self) -> list[str]:
        """Return the lines about ranks that neither wait nor are waited for."""
        others = self.answered - self.waiting.keys() - self.blocked_by.keys() if self.waits else ()
        by_activity = grouped((self._doing(rank), rank) for rank in sorted(others))
        return [
            f"{self.describe_rank(ranks[0])} {activity}" for activity, ranks in by_activity.items()
        ]

    def _stacks(self, culprits: Sequence[Suspect], blamed: Sequence[Suspect]) -> list[str]:
        """Return the stacks of all ranks that answered and were not shown above."""
        above = {(c.rank, (c.detail,)) for c in blamed[:SHOWN_RANKS]}
        stacks_of_ranks = [(self.dumps[rank].stacks, rank) for rank in sorted(self.answered)]
        stacks_of_ranks = [
            (stacks, rank) for stacks, rank in stacks_of_ranks if (rank, stacks) not in above
        ]
        stacks_of_ranks += [((c.detail,), c.rank) for c in culprits if c not in blamed]
        return [
            f"{ranks_listed(ranks)}:\n" + _indented("\n".join(s.rstrip() for s in stacks))
            for stacks, ranks in grouped(stacks_of_ranks).items()
        ]


def _odd(calls: Sequence[tuple[RecordedCall, int]]) -> int | None:
    """Return the one rank that is in another call than two or more others, which agree; else
    None.
    """
    by_call = grouped((call.called, rank) for call, rank in calls)
    alone = [ranks[0] for ranks in by_call.values() if len(ranks) == 1]
    return alone[0] if len(by_call) == 2 and len(alone) == 1 else None


def _is_alone(wait: RankWait) -> bool:
    """Return whether no other member of the group has issued the call of `wait`."""
    return len(wait.behind) == len(wait.call.ranks) - 1


def _section(title: str, parts: Sequence[str]) -> list[str]:
    return [title, *map(_indented, parts)] if parts else []


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.rstrip().splitlines())
