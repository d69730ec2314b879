"""Findings in sentences: why no rank can go on, or which ranks disagree. No torch.

A sentence names a rank with its coordinates, its call, the group with its ranks, and the ranks that
it waits for. The stacks of all these ranks follow.
"""

import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torchdistpackage.thread_ranks.matcher import (
    CREATION,
    SPLIT,
    Disagreement,
    Matcher,
    OpSignature,
    P2POp,
    PendingOp,
    Where,
)
from torchdistpackage.topology.mesh import Mesh, Topology

Name = Callable[[int], str]
"""A function that returns the name of a rank in messages: `rank 3 (data 1 tensor 1)`."""

Path = list[tuple[PendingOp, int | PendingOp, P2POp | None]]
"""A chain of waits. Each step is an entry, what it waits for (a rank that has not made its call, or
an entry that must be done first), and the message that waits, if any."""

SHOWN_FRAMES = 12
"""Innermost frames of a stack that are printed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The first thing that is wrong.

    kind: one of
        "exception": a rank raised an error.
        "disagreement": members of a group are in different calls.
        "cycle": ranks wait for each other.
        "launch order": they would, if the device ran its kernels strictly one by one.
        "first use": they would, if the first call of a group blocked the host.
        "missing": a rank returned without making a call that others wait for.
        "group creation": a member does not come to create a group, or a stranger does.
        "time": the time limit passed.
    ranks: the ranks it names, the one to look at first in front. text: the sentences and stacks.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def rank_name(topology: Topology, rank: int) -> str:
    """Return a rank's name, `rank 3 (data 1 tensor 1)`; axes of one rank are left out."""
    mesh = topology.dense
    coord = mesh.coord(rank)
    coordinates = " ".join(f"{a} {coord[a]}" for a, size in mesh.axes if size > 1)
    return f"rank {rank} ({coordinates})" if coordinates else f"rank {rank}"


def group_name(topology: Topology, ranks: Sequence[int]) -> str:
    """Return the axes along which the ranks differ, `data+tensor`; `global` for all ranks.

    With experts, a group along no dense axis gets a name of the second view, `expert` or
    `expert_data`. A group of only some ranks along its axes, such as two stages that share a
    weight, is called `part of` them.
    """
    mesh = topology.dense
    if len(ranks) == mesh.size:
        long = [name for name, size in mesh.axes if size > 1]
        return long[0] if len(long) == 1 else "global"
    name, is_whole = _along(mesh, ranks)
    if not is_whole and topology.expert.axis_size("expert") > 1:
        other, is_other = _along(topology.expert, ranks)
        if is_other:
            return other
    return name if is_whole else f"part of {name}"


def _along(mesh: Mesh, ranks: Sequence[int]) -> tuple[str, bool]:
    """Return the axes along which the ranks differ, and True if they are all ranks along these."""
    coords = [mesh.coord(rank) for rank in ranks]
    axes = [name for name in mesh.names if len({coord[name] for coord in coords}) > 1]
    return "+".join(axes) or "alone", tuple(mesh.group(ranks[0], axes)) == tuple(ranks)


# -- findings in words ---------------------------------------------------------------------


def disagreement(mismatch: Disagreement, name: Name) -> Finding:
    """Return the finding about two members of a group that are in different calls."""
    first, second = sorted((mismatch.first, mismatch.second), key=lambda end: _entry(end).rank)
    group, first_rank, second_rank = _entry(first).group, _entry(first).rank, _entry(second).rank
    if isinstance(first, P2POp) and isinstance(second, P2POp):
        head = (
            f"on {group} {name(first_rank)} has posted {first.call} {_towards(first, name)}, but "
            f"{name(second_rank)} {second.call} {_towards(second, name)}"
        )
    elif mismatch.what:
        head = f"{name(first_rank)} and {name(second_rank)} disagree on {group}: {mismatch.what}"
    else:
        head = (
            f"call {_entry(first).number} of {group} is {first.call} on {name(first_rank)}, but "
            f"{second.call} on {name(second_rank)}{_difference(first.call, second.call)}"
        )
    stacks = [(first_rank, first.where), (second_rank, second.where)]
    kind = "group creation" if _makes_group(_entry(first)) else "disagreement"
    return Finding(kind, (first_rank, second_rank), with_stacks(head, stacks, name))


def stuck(board: Matcher, entries: Sequence[PendingOp], name: Name) -> Finding:
    """Return the finding why none of `entries` can ever be done.

    The cause is a call that a rank did not make before it returned, or else a cycle of waits.
    """
    for kind in ("missing", "cycle"):
        seen = set[PendingOp]()  # entries without a cycle behind them: no need to search them again
        for entry in entries:
            if (path := _search(board, entry, kind, seen)) is not None:
                return _told(board, path, kind, name)
    raise AssertionError("an entry that waits for no rank")


def _makes_group(entry: PendingOp) -> bool:
    """Return True if the entry creates a group."""
    return entry.call in (CREATION, SPLIT)


def waits(board: Matcher, name: Name) -> str:
    """Return a line for each waiting rank with the call that it waits in."""
    return "\n".join(
        f"  {name(rank)} waits in {_spoken(entry, name)}"
        for rank, entry in sorted(board.waiting.items())
    )


def with_stacks(head: str, stacks: Sequence[tuple[int, Where]], name: Name) -> str:
    """Return `head` followed by the stacks of these ranks."""
    parts = [f"stack of {name(rank)}:\n{_stack(where)}" for rank, where in stacks]
    return "\n".join([head, *parts])


def _stack(where: Where) -> str:
    """Return a stack as Python prints it, the innermost call last."""
    lines: list[str] = [] if where else ["    (nothing recorded)"]
    for file, line, function in reversed(where[:SHOWN_FRAMES]):
        lines.append(f'    File "{file}", line {line}, in {function}')
        if source := linecache.getline(file, line).strip():
            lines.append(f"      {source}")
    return "\n".join(lines)


# -- the graph: an entry waits for ranks that have not made a call, or for another entry ------


def _needs(entry: PendingOp) -> Iterator[tuple[int | PendingOp, P2POp | None]]:
    """Yield what an entry waits for (ranks or entries), and the message of it that waits."""
    group, queue = entry.group, entry.group.queue_of(entry)
    if queue and queue[0] is not entry:
        yield queue[0], None
        return
    if entry.call is not None:
        meeting = group.meetings.get(entry.number, {})
        for rank in group.ranks:
            if rank not in meeting:
                yield rank, None
            elif (head := group.queues[rank][0]) is not meeting[rank]:
                yield head, None
    for message in entry.messages:
        if message.done:
            continue
        index = list(group.posted[message.key]).index(message)
        others = group.posted.get(message.match_key) or ()
        if index < len(others):
            yield group.queues[others[index].entry.rank][0], message
        elif message.peer is not None:
            yield message.peer, message
        else:
            yield from ((rank, message) for rank in group.ranks if rank != entry.rank)


def _search(board: Matcher, start: PendingOp, kind: str, seen: set[PendingOp]) -> Path | None:
    """Return the chain from `start` to a rank that has ended, or around a cycle of waits."""
    if start in seen:
        return None
    seen.add(start)
    path: Path = []
    # a loop and no recursion: a path may be longer than Python's stack allows
    open_entries = [(start, _needs(start))]
    position = {start: 0}
    while open_entries:
        entry, needs = open_entries[-1]
        del path[len(open_entries) - 1 :]
        needed, message = next(needs, (None, None))
        if needed is None:
            open_entries.pop()
            del position[entry]
            continue
        path.append((entry, needed, message))
        if not isinstance(needed, PendingOp) and needed in board.ended:
            if kind == "missing":
                return path
            continue
        next_entry = needed if isinstance(needed, PendingOp) else board.waiting.get(needed)
        if next_entry is None:
            continue
        if kind == "cycle" and next_entry in position:
            return path[position[next_entry] :]
        if next_entry not in seen:
            seen.add(next_entry)
            position[next_entry] = len(open_entries)
            open_entries.append((next_entry, _needs(next_entry)))
    return None


def _told(board: Matcher, path: Path, kind: str, name: Name) -> Finding:
    """Return the finding about a chain of waits."""
    head = "ranks wait for each other in a circle:"
    if kind == "missing":
        head = "a call is missing: a rank waits for another that has returned without it"
    lines = [head]
    for entry, needed, message in path:
        rank = needed.rank if isinstance(needed, PendingOp) else needed
        call = _spoken(entry, name, message)
        does = "waits in" if board.waiting.get(entry.rank) is entry else "has issued"
        if rank == entry.rank:
            line = f"{does} {call}, which comes after an earlier call that it has not finished"
        elif isinstance(needed, PendingOp):
            line = (
                f"{does} {call}, which {name(rank)} can only make after a call that is not "
                "finished:"
            )
        elif entry.call is not None:
            line = f"{does} {call}, which {name(rank)} has not entered"
        else:
            line = f"{does} {call}, whose other side {name(rank)} has not called"
        if needed in board.ended and kind == "missing":
            line += ", and it has returned"
        lines.append(f"  {name(entry.rank)} {line}")
    ranks = tuple(dict.fromkeys(entry.rank for entry, _, _ in path))
    if kind == "missing":
        gone = path[-1][1]
        assert isinstance(gone, int)
        ranks = (gone, *(rank for rank in ranks if rank != gone))
    stacks = [(e.rank, m.where if m is not None else e.where) for e, _, m in path]
    if any(_makes_group(entry) for entry, _, _ in path):
        kind = "group creation"
    return Finding(kind, ranks, with_stacks("\n".join(lines), stacks, name))


def _spoken(entry: PendingOp, name: Name, message: P2POp | None = None) -> str:
    """Return the text of an entry: its collective, or its messages."""
    if entry.call is not None:
        return f"call {entry.number} of {entry.group}, {entry.call}"
    open_messages = [m for m in entry.messages if not m.done] if message is None else [message]
    texts = [f"{m.call} {_towards(m, name)}" for m in open_messages] or ["messages"]
    return f"{' and '.join(texts)} on {entry.group}"


def _towards(message: P2POp, name: Name) -> str:
    """Return the text of a message's peer."""
    peer = "anybody" if message.peer is None else name(message.peer)
    return f"{'to' if message.is_send else 'from'} {peer}"


def _difference(one: OpSignature | None, other: OpSignature | None) -> str:
    """Return a text with the facts in which two calls of one operation differ."""
    if one is None or other is None or one.operation != other.operation:
        return ""
    one_facts, other_facts = dict(one.facts), dict(other.facts)
    names = [n for n in (one_facts | other_facts) if one_facts.get(n) != other_facts.get(n)]
    return f": they differ in {', '.join(names)}"


def _entry(end: PendingOp | P2POp) -> PendingOp:
    """Return the entry of a message, or the entry itself."""
    return end if isinstance(end, PendingOp) else end.entry
