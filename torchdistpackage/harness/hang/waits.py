"""Find which ranks wait for which from the records of all ranks, and describe calls. No torch.

The k-th collective of a group waits for the members that have not issued their k-th, the k-th
receive from a peer for the peer's k-th send. A host that is blocked says so; where a device does
the waiting (NCCL), a call counts as waited for while a rank that must take part is behind.
"""

import re
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from torchdistpackage.errors import ScheduleError
from torchdistpackage.harness.hang.packed import CallRows, RankTuple
from torchdistpackage.schedule.actions import parse_action
from torchdistpackage.text import ranks_listed

_ONE_SHAPE = ("all_reduce", "broadcast")
"""Collectives in which all members have one shape; in others shapes may differ."""
_OTHER_END = {"send": "receive", "receive": "send"}
"""Ranks that are listed one by one, where more of them say the same."""

GroupKey = tuple[tuple[int, ...], int]
"""Ranks of a group, and how many groups of the same ranks a rank used before it."""
Alike = TypeVar("Alike")


class RecordedCall(NamedTuple):
    """One call of a comm.flight_recorder.RecorderSnapshot. on_device: that waits, not the host."""

    group: GroupKey
    operation: str
    sequence: int
    shape: tuple[int, ...]
    dtype: str
    peer: int | None
    action: str | None
    state: str
    age_s: float
    axis: str
    on_device: bool

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.group[0]

    @property
    def line(self) -> tuple[object, ...]:
        """Return the key of calls that are numbered together."""
        return self.group, self.peer, self.operation if self.peer is not None else ""

    def differs(self, other: "RecordedCall") -> bool:
        """Return whether two calls with the same number cannot belong together."""
        if self.peer is None and self.operation != other.operation:
            return True
        same_shape = self.peer is not None or self.operation in _ONE_SHAPE
        return self.dtype != other.dtype or (same_shape and self.shape != other.shape)

    def __str__(self) -> str:
        """Return the call, such as `RECV_F stage 2 microbatch 5` or `all_reduce number 41`."""
        if self.peer is None:
            return f"{self.operation} number {self.sequence} of {self._group}"
        if self.action:
            try:
                action = parse_action(self.action)
            except ScheduleError:
                return f"{self.action} ({self.called})"
            return f"{action.kind} stage {action.stage} microbatch {action.microbatch}"
        return f"{self.operation} number {self.sequence}{self._towards}"

    @property
    def numbered(self) -> str:
        """Return the number of the call in its group, which both sides of a disagreement share."""
        kind = "collective" if self.peer is None else "message"
        return f"{kind} number {self.sequence} of {self._group}"

    @property
    def called(self) -> str:
        """Return operation and tensor, such as `all_reduce float32[1000]`."""
        return f"{self.operation} {self._tensor}".rstrip()

    @property
    def exactly(self) -> str:
        """Return a text with all known facts of the call."""
        tensor = f", {self._tensor}" if self.dtype else ""
        text = f"{self.operation} number {self.sequence}{self._towards}"
        return f"{text}, {self._group}{tensor}, for {self.age_s:.1f} s"

    @property
    def _tensor(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.dtype else ""

    @property
    def _towards(self) -> str:
        preposition = "to" if self.operation == "send" else "from"
        return "" if self.peer is None else f" {preposition} rank {self.peer}"

    @property
    def _group(self) -> str:
        name = f"the {self.axis} group" if self.axis else "the group"
        return f"{name} of {ranks_listed(self.ranks, 'ranks')}"


@dataclass(frozen=True, slots=True)
class RankWait:
    """`rank` waits in `call` for ranks `behind`, which have issued that many calls.

    other: their call, if they have come as well: it differs, or the two do not end.
    """

    rank: int
    call: RecordedCall
    behind: tuple[int, ...]
    issued: tuple[int, ...] = ()
    other: RecordedCall | None = None

    @property
    def disagrees(self) -> bool:
        return self.other is not None and self.call.differs(self.other)


class RankRecord:
    """The snapshot of one rank (comm.flight_recorder.RecorderSnapshot), by groups and peers."""

    def __init__(self, snapshot: Mapping[str, Any]) -> None:
        groups: Sequence[Mapping[str, Any]] = snapshot["groups"]
        # groups of the same ranks are distinguished by the order in which they were made
        lists = [x if isinstance(x := group["ranks"], RankTuple) else tuple(x) for group in groups]
        keys = [(ranks, lists[:i].count(ranks)) for i, ranks in enumerate(lists)]
        on_device = [group["done"] is None for group in groups]
        self.on_device = any(on_device)
        self.issued = {key: group["issued"] for key, group in zip(keys, groups, strict=True)}
        self.messages: dict[tuple[GroupKey, int, str], int] = {}
        for peer in snapshot["peers"]:
            key = keys[peer["group"]]
            self.messages[key, peer["peer"], "send"] = peer["sent"]
            self.messages[key, peer["peer"], "receive"] = peer["received"]
        self._keys, self._groups, self._on_device = keys, groups, on_device
        self._calls = CallRows.of(snapshot["calls"])

    @cached_property
    def calls(self) -> list[RecordedCall]:
        """All calls of the snapshot, oldest first. They are decoded late, as a report over
        thousands of ranks needs few of them.
        """
        return list(map(self._call, range(len(self._calls))))

    def _call(self, i: int) -> RecordedCall:
        columns = self._calls.columns
        kind = columns.kinds[columns.places[i]]
        at = kind["group"]
        return RecordedCall(
            self._keys[at],
            kind["operation"],
            columns.sequences[i],
            tuple(kind["shape"]),
            kind["dtype"],
            kind["peer"],
            kind["action"],
            columns.states[i],
            self._calls.ages[i],
            self._groups[at]["axis"],
            self._on_device[at],
        )

    def pending(self) -> list[RecordedCall]:
        """Return the calls that block the host, and the last call in which each device may wait."""
        columns = self._calls.columns
        chosen = [*columns.waiting, *(i for group, i in columns.last if self._on_device[group])]
        return list(map(self._call, chosen))

    def matching(self, call: RecordedCall, rank: int) -> RecordedCall | None:
        """Return this rank's call that must meet `call` of `rank`, if the record still has it."""
        columns = self._calls.columns
        for i in columns.by_sequence.get(call.sequence, ()):
            if self._keys[columns.kinds[columns.places[i]]["group"]] != call.group:
                continue
            recorded = self._call(i)
            if call.peer is None and recorded.peer is None:
                return recorded
            if recorded.peer == rank and recorded.operation == _OTHER_END.get(call.operation):
                return recorded
        return None

    def reached(self, call: RecordedCall, rank: int) -> int:
        """Return how many calls of this rank could have met those of `rank` up to `call`."""
        if call.peer is None:
            return self.issued.get(call.group, 0)
        return self.messages.get((call.group, rank, _OTHER_END[call.operation]), 0)


class _Meeting:
    """One collective, or one message: the missing ranks, and the calls of the others."""

    def __init__(self, call: RecordedCall, rank: int, records: Mapping[int, RankRecord]) -> None:
        members = call.ranks if call.peer is None else (call.peer,)
        reached = {m: records[m].reached(call, rank) for m in members if m in records}
        self.behind = tuple(m for m in members if reached.get(m, -1) < call.sequence)
        self.issued = tuple(reached.get(m, -1) for m in self.behind)
        self.calls: dict[int, RecordedCall] = {}
        if not self.behind:
            matches = {m: records[m].matching(call, rank) for m in members}
            self.calls = {m: other for m, other in matches.items() if other is not None}
        # of each kind the first member
        backwards = reversed(self.calls.items())
        self.kinds = {(c.operation, c.dtype, c.shape): m for m, c in backwards}
        self.blocked = sorted(m for m, c in self.calls.items() if c.state == "waiting")

    def wait(self, call: RecordedCall, rank: int) -> RankWait | None:
        """Return the wait of `rank`, which is in `call`."""
        if self.behind:
            return RankWait(rank, call, self.behind, self.issued)
        for member in sorted(self.kinds.values()):
            if member != rank and call.differs(self.calls[member]):
                return RankWait(rank, call, (member,), other=self.calls[member])
        if call.state != "waiting":
            return None
        # All have come. The next one that is blocked in it: so that a group waits in one circle.
        position = bisect(self.blocked, rank)
        for member in self.blocked[position:] + self.blocked[:1]:
            if member != rank:
                return RankWait(rank, call, (member,), other=self.calls[member])
        return RankWait(rank, call, ())


def waits(records: Mapping[int, RankRecord], blocked: Iterable[int]) -> list[RankWait]:
    """Return all waits of the ranks `blocked`. A rank without a record counts as waited for."""
    meetings: dict[tuple[object, ...], _Meeting] = {}
    rank_waits: list[RankWait] = []
    for rank in sorted(blocked):
        for call in records[rank].pending():
            message_key = () if call.peer is None else (rank, call.peer, call.operation)
            key = (call.group, call.sequence, *message_key)
            meeting = meetings.get(key) or meetings.setdefault(key, _Meeting(call, rank, records))
            if (wait := meeting.wait(call, rank)) is not None:
                rank_waits.append(wait)
    return rank_waits


def blocked_by(rank_waits: Sequence[RankWait]) -> dict[int, set[int]]:
    """Return a map from each rank to the ranks that wait for it, directly or through others."""
    direct: dict[int, set[int]] = {}
    for wait in rank_waits:
        for member in wait.behind:
            direct.setdefault(member, set()).add(wait.rank)
    result: dict[int, set[int]] = {}
    for rank in direct:
        seen, todo = set[int](), [rank]
        while todo:
            new = direct.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        result[rank] = seen - {rank}
    return result


def cycles(rank_waits: Sequence[RankWait]) -> list[list[RankWait]]:
    """Return waits that lead back to where they began, for ranks that wait for no rank outside of
    the cycle.
    """
    of_rank: dict[int, list[RankWait]] = {}
    for wait in rank_waits:
        if wait.behind:
            of_rank.setdefault(wait.rank, []).append(wait)
    blocked = blocked_by(rank_waits)
    explained = {r for end in blocked.keys() - of_rank.keys() for r in blocked[end]}
    result: list[list[RankWait]] = []
    placed: set[int] = set()
    for rank in sorted(of_rank.keys() - explained):
        path: dict[int, RankWait] = {}
        while rank not in path and rank not in placed:
            path[rank] = max(of_rank[rank], key=lambda wait: wait.disagrees)
            rank = path[rank].behind[0]
        if rank in path:
            order = list(path)
            result.append([path[r] for r in order[order.index(rank) :]])
        placed |= path.keys()
    return result


# -- a rank that aborted ------------------------------------------------------------------

_ABORTED = "Fatal Python error: Aborted"
_OURS = "/torchdistpackage/comm/"
_ENTRY = re.compile(rf'{_OURS}primitives\.py", line \d+ in ([a-z]\w*)$', re.MULTILINE)
_ADVICE = (
    "gloo aborts the rank that is sent more than it expects, so compare the calls: "
    "`with comm.checked_calls():`, or train.check_calls"
)


def aborted(rank: int, stack: str, records: Mapping[int, RankRecord]) -> str:
    """Return how gloo aborted `rank`, as a text after "rank 0 ", or "" if it did not.

    gloo aborts the rank that is sent more than it has room for, which may be the one that did
    right. What it brought itself is lost with it: its stack says in which operation it was, and the
    records of the others say with what they met it.

    stack: as faulthandler wrote it. records: of the others.
    """
    met = _met(rank, records)
    if not stack.startswith(_ABORTED) or _OURS not in stack or not met:
        return ""
    # the innermost frame comes first, and the call that was numbered is the outermost
    operation = (_ENTRY.findall(stack) or [""])[-1].removeprefix("start_")
    first = max(met.values(), key=lambda call: call.operation == operation)
    key = first.line, first.sequence
    brought_calls = {peer: call for peer, call in met.items() if (call.line, call.sequence) == key}
    brought = ", ".join(versions((call, peer) for peer, call in brought_calls.items()))
    inside = f"inside {operation}" if operation else "there"
    is_other = bool(operation) and first.peer is None and operation != first.operation
    if is_other or any(first.differs(call) for call in brought_calls.values()):
        return (
            f"and {ranks_listed(sorted(brought_calls))} do not agree on {first.numbered}: it "
            f"crashed ({_ABORTED}) {inside}, where the others have {brought}"
        )
    return (
        f"is gone: it crashed ({_ABORTED}) {inside}, {first.numbered}, to which the others "
        f"brought {brought}; {_ADVICE}"
    )


def _met(rank: int, records: Mapping[int, RankRecord]) -> dict[int, RecordedCall]:
    """Return, for each peer, its last unfinished call with `rank` in which the host and not a
    device waits.
    """
    calls: dict[int, RecordedCall] = {}
    for peer, record in records.items():
        for call in reversed(record.calls):
            together = call.peer == rank if call.peer is not None else rank in call.ranks
            if together and call.state != "done" and not call.on_device:
                calls[peer] = call
                break
    return calls


# -- in words -----------------------------------------------------------------------------


def versions(calls: Iterable[tuple[RecordedCall, int]]) -> list[str]:
    """Return texts of calls and their ranks, such as `all_reduce float32[4] (ranks 0, 2)`."""
    by_version = grouped((call.called, rank) for call, rank in calls)
    return [f"{version} ({ranks_listed(ranks)})" for version, ranks in by_version.items()]


def grouped(pairs: Iterable[tuple[Alike, int]]) -> dict[Alike, list[int]]:
    """Group ranks that have the same text."""
    groups: dict[Alike, list[int]] = {}
    for key, rank in pairs:
        groups.setdefault(key, []).append(rank)
    return groups
