"""Which ranks wait for which, from the records of all ranks, and their calls in words. No torch.

A call is matched by its number. The k-th collective of a group waits for the members that
have not issued their k-th, the k-th receive from a peer for the peer's k-th send. A host that
is blocked says so; where a device does the waiting (NCCL), a call counts as waited for while
somebody who must take part is behind.
"""

import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import parse_action

# elsewhere members may hold shapes of their own
_ONE_SHAPE = ("all_reduce", "broadcast")
_OTHER_END = {"send": "receive", "receive": "send"}
SHOWN = 8
"""Ranks that are listed one by one, where more of them say the same."""

GroupKey = tuple[tuple[int, ...], int]
"""Ranks of a group, and how many groups of the same ranks a rank used before it."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of the record; `sequence` counts as comm.flight_recorder says, `done` None on a
    device."""

    group: GroupKey
    axis: str
    operation: str
    sequence: int
    shape: tuple[int, ...]
    dtype: str
    peer: int | None
    action: str | None
    state: str
    age_s: float
    on_device: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.group[0]

    @property
    def line(self) -> tuple[object, ...]:
        """The calls that are numbered together."""
        return self.group, self.peer, self.operation if self.peer is not None else ""

    @property
    def tensor(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.dtype else ""


@dataclass(frozen=True, slots=True)
class RankWait:
    """`rank` waits in `call` for ranks `behind`.

    other: their call, where they have come as well: it differs, or the two do not end.
    """

    rank: int
    call: RecordedCall
    behind: tuple[int, ...]
    issued: tuple[int, ...] = ()
    other: RecordedCall | None = None

    @property
    def disagrees(self) -> bool:
        return self.other is not None and differ(self.call, self.other)


class RankRecord:
    """The snapshot of one rank (comm.flight_recorder.Snapshot), by groups and peers."""

    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        groups: Sequence[Mapping[str, Any]] = snapshot["groups"]
        # groups of the same ranks are told apart by the order in which they were made
        lists = [tuple(group["ranks"]) for group in groups]
        keys = [(ranks, lists[:i].count(ranks)) for i, ranks in enumerate(lists)]
        self.issued = {key: group["issued"] for key, group in zip(keys, groups, strict=True)}
        self.messages: dict[tuple[GroupKey, int, str], int] = {}
        for peer in snapshot["peers"]:
            key = keys[peer["group"]]
            self.messages[key, peer["peer"], "send"] = peer["sent"]
            self.messages[key, peer["peer"], "receive"] = peer["received"]
        self.calls = [
            RecordedCall(
                group=keys[call["group"]],
                axis=groups[call["group"]]["axis"],
                operation=call["operation"],
                sequence=call["sequence"],
                shape=tuple(call["shape"]),
                dtype=call["dtype"],
                peer=call["peer"],
                action=call["action"],
                state=call["state"],
                age_s=call["age_s"],
                on_device=groups[call["group"]]["done"] is None,
            )
            for call in snapshot["calls"]
        ]

    def pending(self) -> list[RecordedCall]:
        """Where the host is blocked, and the last call of each kind that a device may wait in."""
        last = {c.line: c for c in self.calls}
        on_device = [c for c in last.values() if c.on_device and c.state != "waiting"]
        return [c for c in self.calls if c.state == "waiting"] + on_device

    def matching(self, call: RecordedCall, rank: int) -> RecordedCall | None:
        """My call that must meet `call` of `rank`, if the ring still has it."""
        operation = _OTHER_END.get(call.operation) if call.peer is not None else None
        for mine in reversed(self.calls):
            if mine.group != call.group or mine.sequence != call.sequence:
                continue
            if mine.peer is None and call.peer is None:
                return mine
            if mine.peer == rank and mine.operation == operation:
                return mine
        return None

    def reached(self, call: RecordedCall, rank: int) -> int:
        """How many calls of mine could have met those of `rank` up to `call`."""
        if call.peer is None:
            return self.issued.get(call.group, 0)
        return self.messages.get((call.group, rank, _OTHER_END[call.operation]), 0)


class _Meeting:
    """One collective, or one message: who has not come, and with what the others have."""

    def __init__(self, call: RecordedCall, rank: int, records: Mapping[int, RankRecord]) -> None:
        members = call.ranks if call.peer is None else (call.peer,)
        reached = {m: records[m].reached(call, rank) for m in members if m in records}
        self.behind = tuple(m for m in members if reached.get(m, -1) < call.sequence)
        self.issued = tuple(reached.get(m, -1) for m in self.behind)
        self.calls: dict[int, RecordedCall] = {}
        if not self.behind:
            found = {m: records[m].matching(call, rank) for m in members}
            self.calls = {m: other for m, other in found.items() if other is not None}
        # of each kind the first member
        backwards = reversed(self.calls.items())
        self.kinds = {(c.operation, c.dtype, c.shape): m for m, c in backwards}
        self.blocked = sorted(m for m, c in self.calls.items() if c.state == "waiting")

    def wait(self, call: RecordedCall, rank: int) -> RankWait | None:
        """That of `rank`, which is there with `call`."""
        if self.behind:
            return RankWait(rank, call, self.behind, self.issued)
        for member in sorted(self.kinds.values()):
            if member != rank and differ(call, self.calls[member]):
                return RankWait(rank, call, (member,), other=self.calls[member])
        if call.state != "waiting":
            return None
        # All have come. The next one that is blocked in it: so that a group waits in one circle.
        position = bisect(self.blocked, rank)
        following = [m for m in self.blocked[position:] + self.blocked[:1] if m != rank]
        if following:
            return RankWait(rank, call, (following[0],), other=self.calls[following[0]])
        return RankWait(rank, call, ())


def waits(records: Mapping[int, RankRecord], blocked: Iterable[int]) -> list[RankWait]:
    """All waits of the ranks `blocked`. Whoever needs a rank without a record waits for it."""
    meetings: dict[tuple[object, ...], _Meeting] = {}
    found: list[RankWait] = []
    for rank in sorted(blocked):
        for call in records[rank].pending():
            own = () if call.peer is None else (rank, call.peer, call.operation)
            key = (call.group, call.sequence, *own)
            meeting = meetings.get(key) or meetings.setdefault(key, _Meeting(call, rank, records))
            if (wait := meeting.wait(call, rank)) is not None:
                found.append(wait)
    return found


def differ(one: RecordedCall, other: RecordedCall) -> bool:
    """Whether two calls of one number cannot be meant for each other."""
    if one.peer is not None:
        return (one.shape, one.dtype) != (other.shape, other.dtype)
    if one.operation != other.operation or one.dtype != other.dtype:
        return True
    return one.operation in _ONE_SHAPE and one.shape != other.shape


def blocked_by(found: Sequence[RankWait]) -> dict[int, set[int]]:
    """Rank -> ranks that wait for it, directly or through others."""
    direct: dict[int, set[int]] = {}
    for wait in found:
        for member in wait.behind:
            direct.setdefault(member, set()).add(wait.rank)
    result: dict[int, set[int]] = {}
    for rank in direct:
        seen: set[int] = set()
        todo = [rank]
        while todo:
            new = direct.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        result[rank] = seen - {rank}
    return result


def cycles(found: Sequence[RankWait]) -> list[list[RankWait]]:
    """Waits that lead back to where they began, for ranks that wait for nobody outside of one."""
    of_rank: dict[int, list[RankWait]] = {}
    for wait in found:
        if wait.behind:
            of_rank.setdefault(wait.rank, []).append(wait)
    ends = {m for wait in found for m in wait.behind} - of_rank.keys()
    explained = set(ends)
    by_target = blocked_by(found)
    for end in ends:
        explained |= by_target.get(end, set())
    result: list[list[RankWait]] = []
    placed: set[int] = set()
    for start in sorted(of_rank.keys() - explained):
        path: dict[int, RankWait] = {}
        rank = start
        while rank not in path and rank not in placed:
            wait = next((w for w in of_rank[rank] if w.disagrees), of_rank[rank][0])
            path[rank] = wait
            rank = wait.behind[0]
        if rank in path:
            order = list(path)
            result.append([path[r] for r in order[order.index(rank) :]])
        placed |= path.keys()
    return result


# -- a call in words ----------------------------------------------------------------------


def format_call(call: RecordedCall) -> str:
    """Where a rank waits: `RECV_F stage 2 microbatch 5`, `all_reduce number 41 of data`."""
    if call.peer is None:
        return f"{call.operation} number {call.sequence} of {_group(call)}"
    if call.action:
        try:
            action = parse_action(call.action)
        except ScheduleError:
            return f"{call.action} ({called(call)})"
        return f"{action.kind} stage {action.stage} microbatch {action.microbatch}"
    return f"{call.operation} number {call.sequence} {_towards(call)} rank {call.peer}"


def numbered(call: RecordedCall) -> str:
    """What both sides of a disagreement share."""
    what = "collective" if call.peer is None else "message"
    return f"{what} number {call.sequence} of {_group(call)}"


def called(call: RecordedCall) -> str:
    """`all_reduce float32[1000]`."""
    return f"{call.operation} {call.tensor}".rstrip()


def exactly(call: RecordedCall) -> str:
    """Everything that is known of a call."""
    to = "" if call.peer is None else f" {_towards(call)} rank {call.peer}"
    tensor = f", {call.tensor}" if call.tensor else ""
    what = f"{call.operation} number {call.sequence}{to}"
    return f"{what}, {_group(call)}{tensor}, for {call.age_s:.1f} s"


def _towards(call: RecordedCall) -> str:
    return "to" if call.operation == "send" else "from"


def _group(call: RecordedCall) -> str:
    name = f"the {call.axis} group" if call.axis else "the group"
    return f"{name} of ranks {listed(call.ranks)}"


def ranks_listed(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 4, 8`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def listed(ranks: Sequence[int]) -> str:
    """`0, 4, 8, ... (32 ranks)`."""
    shown = ", ".join(map(str, ranks[:SHOWN]))
    return shown if len(ranks) <= SHOWN else f"{shown}, ... ({len(ranks)} ranks)"


# -- a rank that aborted ------------------------------------------------------------------

_ABORTED = "Fatal Python error: Aborted"
_OURS = "/torchdistpackage/comm/"
_ENTRY = re.compile(rf'{_OURS}primitives\.py", line \d+ in ([a-z]\w*)$', re.MULTILINE)
_ADVICE = (
    "gloo aborts the rank that is sent more than it expects, so compare the calls: "
    "`with comm.checked_calls():`, or train.check_calls"
)


def aborted(rank: int, stack: str, records: Mapping[int, RankRecord]) -> str:
    """How `rank` ended, as said after "rank 0 "; "" where it did not abort in a call of gloo's.

    gloo aborts the rank that is sent more than it has room for, which may be the one that did
    right. What it brought itself is lost with it: its stack says in which operation it was, and the
    records of the others say with what they met it.

    stack: as faulthandler wrote it. records: of the others.
    """
    if not stack.startswith(_ABORTED) or _OURS not in stack:
        return ""
    entries = _ENTRY.findall(stack)
    # the innermost frame comes first, and the call that was numbered is the outermost
    operation = entries[-1].removeprefix("start_") if entries else ""
    met = _met(rank, records)
    if not met:
        return ""
    first = next((call for call in met.values() if call.operation == operation), None)
    first = first or next(iter(met.values()))
    there = {peer: call for peer, call in met.items() if call.line == first.line}
    there = {peer: call for peer, call in there.items() if call.sequence == first.sequence}
    versions = dict[str, list[int]]()
    for peer, call in there.items():
        versions.setdefault(called(call), []).append(peer)
    said = ", ".join(f"{text} ({ranks_listed(ranks)})" for text, ranks in versions.items())
    inside = f"inside {operation}" if operation else "there"
    other_operation = bool(operation) and first.peer is None and operation != first.operation
    if other_operation or any(differ(first, call) for call in there.values()):
        return (
            f"and {ranks_listed(sorted(there))} do not agree on {numbered(first)}: it crashed "
            f"({_ABORTED}) {inside}, where the others have {said}"
        )
    return (
        f"is gone: it crashed ({_ABORTED}) {inside}, {numbered(first)}, to which the others "
        f"brought {said}; {_ADVICE}"
    )


def _met(rank: int, records: Mapping[int, RankRecord]) -> dict[int, RecordedCall]:
    """By peer its last call with `rank` that has not ended, where no device does the waiting."""
    found: dict[int, RecordedCall] = {}
    for peer, record in records.items():
        for call in reversed(record.calls):
            together = call.peer == rank if call.peer is not None else rank in call.ranks
            if together and call.state != "done" and not call.on_device:
                found[peer] = call
                break
    return found
