"""Why nobody can move, or who disagrees, in words. No torch.

One rule: every sentence names a rank by its coordinates, the call it is in, the group by its
name and ranks, and whom it waits for; the stacks of all ranks named follow.
"""

import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torchdistpackage.harness.lint.matcher import (
    CREATION,
    SPLIT,
    Disagreement,
    Matcher,
    P2POp,
    PendingOp,
    Where,
)

Name = Callable[[int], str]
"""A rank as people call it: `rank 3 (data 1 tensor 1)`."""

Path = list[tuple[PendingOp, int | PendingOp, P2POp | None]]
"""Steps of a way: an entry, what it needs (a rank that has not made its call, or an entry that must
be done first), and for which of its messages."""

SHOWN_FRAMES = 12
"""Innermost frames of a stack that are printed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The first thing that is wrong.

    kind: "exception" (a rank raised), "disagreement" (members of a group are not in the same
        call), "cycle" (ranks wait for each other), "launch order" (they would, if a device ran
        what it is given one by one), "first use" (they would, if the first call of a group stopped
        the host), "missing" (a call that a rank which has returned never made), "group creation"
        (members do not come to make a group, or others do), "time" (the limit passed).
    ranks: those it names, the one to look at first in front. text: all of it, with stacks.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return self.text


def disagreement(found: Disagreement, name: Name) -> Finding:
    """What two members of a group do where they should do the same."""
    first, second = sorted((found.first, found.second), key=_rank)
    group = _entry(first).group
    one, other = _rank(first), _rank(second)
    if found.what:
        head = f"{name(one)} and {name(other)} disagree on {group}: {found.what}"
    elif isinstance(first, PendingOp) and isinstance(second, PendingOp):
        head = (
            f"call {first.number} of {group} is {_call(first)} on {name(one)}, but "
            f"{_call(second)} on {name(other)}{_difference(first, second)}"
        )
    else:
        assert isinstance(first, P2POp) and isinstance(second, P2POp)
        head = (
            f"on {group} {name(one)} has posted {first.call} {_towards(first, name)}, but "
            f"{name(other)} {second.call} {_towards(second, name)}"
        )
    stacks = [(one, _where(first)), (other, _where(second))]
    kind = "group creation" if makes_group(_entry(first)) else "disagreement"
    return Finding(kind, (one, other), _with_stacks(head, stacks, name))


def stuck(board: Matcher, entries: Sequence[PendingOp], name: Name) -> Finding:
    """What `entries`, none of which can ever be done, wait for in the end.

    A call that a rank which has returned did not make goes before a circle of waits.
    """
    for kind in ("missing", "cycle"):
        seen: set[PendingOp] = (
            set()
        )  # what was gone through in vain leads nowhere from another start
        for entry in entries:
            path = _search(board, entry, kind, seen)
            if path is not None:
                return _told(board, path, kind, name)
    raise AssertionError("an entry that waits for nobody")


def makes_group(entry: PendingOp) -> bool:
    return entry.calls in ((CREATION,), (SPLIT,))


def waits(board: Matcher, name: Name) -> str:
    """Where every waiting rank is, one line each."""
    return "\n".join(
        f"  {name(rank)} waits in {_spoken(entry, name)}"
        for rank, entry in sorted(board.waiting.items())
    )


def stack(where: Where) -> str:
    """A stack as Python prints it, the innermost call last."""
    if isinstance(where, str):
        return f"    at {where}" if where else "    (nothing recorded)"
    lines: list[str] = []
    for file, line, function in reversed(where[:SHOWN_FRAMES]):
        lines.append(f'    File "{file}", line {line}, in {function}')
        if source := linecache.getline(file, line).strip():
            lines.append(f"      {source}")
    return "\n".join(lines)


# -- the graph: an entry waits for ranks that have not made a call, or for another entry ------


def _needs(entry: PendingOp) -> Iterator[tuple[int | PendingOp, P2POp | None]]:
    """What an entry waits for, and with which of its messages."""
    group, queue = entry.group, entry.group.queue_of(entry)
    if queue and queue[0] is not entry:
        yield queue[0], None
        return
    if entry.calls:
        meeting = group.meetings.get(entry.number, {})
        for rank in group.ranks:
            if rank not in meeting:
                yield rank, None
            elif (head := group.queues[rank][0]) is not meeting[rank]:
                yield head, None
    for message in entry.messages:
        if message.done:
            continue
        at = list(group.posted[message.key]).index(message)
        others = group.posted.get(message.match_key) or ()
        if at < len(others):
            other = others[at].entry
            assert other is not None
            yield group.queues[other.rank][0], message
        elif message.peer is not None:
            yield message.peer, message
        else:
            yield from ((rank, message) for rank in group.ranks if rank != entry.rank)


def _search(board: Matcher, start: PendingOp, kind: str, seen: set[PendingOp]) -> Path | None:
    """The way from `start` to a rank that has ended, or to an entry that is on the way already."""
    if start in seen:
        return None
    seen.add(start)
    path: Path = []
    # no recursion: a way may be longer than Python's stack
    ways = [(start, _needs(start))]
    place = {start: 0}
    while ways:
        entry, needs = ways[-1]
        del path[len(ways) - 1 :]
        needed, message = next(needs, (None, None))
        if needed is None:
            ways.pop()
            del place[entry]
            continue
        path.append((entry, needed, message))
        if not isinstance(needed, PendingOp) and needed in board.ended:
            if kind == "missing":
                return path
            continue
        then = needed if isinstance(needed, PendingOp) else board.waiting.get(needed)
        if then is None:
            continue
        if kind == "cycle" and then in place:
            return path[place[then] :]
        if then not in seen:
            seen.add(then)
            place[then] = len(ways)
            ways.append((then, _needs(then)))
    return None


def _told(board: Matcher, path: Path, kind: str, name: Name) -> Finding:
    head = "ranks wait for each other in a circle:"
    if kind == "missing":
        head = "a call is missing: somebody waits for a rank that has returned without it"
    lines = [head]
    for entry, needed, message in path:
        rank = needed.rank if isinstance(needed, PendingOp) else needed
        what = _spoken(entry, name, message)
        does = "waits in" if board.waiting.get(entry.rank) is entry else "has issued"
        if rank == entry.rank:
            line = f"{does} {what}, which stands behind an earlier call of its own"
        elif isinstance(needed, PendingOp):
            line = f"{does} {what}, to which {name(rank)} comes after a call that is not done:"
        elif entry.calls:
            line = f"{does} {what}, which {name(rank)} has not entered"
        else:
            line = f"{does} {what}, the other end of which {name(rank)} has not come to"
        if needed in board.ended and kind == "missing":
            line += ", and it has returned"
        lines.append(f"  {name(entry.rank)} {line}")
    ranks = tuple(dict.fromkeys(entry.rank for entry, _, _ in path))
    if kind == "missing":
        gone = path[-1][1]
        assert isinstance(gone, int)
        ranks = (gone, *(rank for rank in ranks if rank != gone))
    stacks = [(e.rank, m.where if m is not None else e.where) for e, _, m in path]
    if any(makes_group(entry) for entry, _, _ in path):
        kind = "group creation"
    return Finding(kind, ranks, _with_stacks("\n".join(lines), stacks, name))


def _with_stacks(head: str, stacks: Sequence[tuple[int, Where]], name: Name) -> str:
    parts = [f"stack of {name(rank)}:\n{stack(where)}" for rank, where in stacks]
    return "\n".join([head, *parts])


def _spoken(entry: PendingOp, name: Name, message: P2POp | None = None) -> str:
    if entry.calls:
        return f"call {entry.number} of {entry.group}, {_call(entry)}"
    shown = [m for m in entry.messages if not m.done] if message is None else [message]
    texts = [f"{m.call} {_towards(m, name)}" for m in shown] or ["messages"]
    return f"{' and '.join(texts)} on {entry.group}"


def _towards(message: P2POp, name: Name) -> str:
    peer = "anybody" if message.peer is None else name(message.peer)
    return f"{'to' if message.is_send else 'from'} {peer}"


def _call(entry: PendingOp) -> str:
    first, more = str(entry.calls[0]), len(entry.calls) - 1
    return f"{first} and {more} more" if more else first


def _difference(first: PendingOp, second: PendingOp) -> str:
    """Which fact of the same operation differs."""
    one, other = first.calls[0], second.calls[0]
    if one.operation != other.operation:
        return ""
    mine, theirs = dict(one.facts), dict(other.facts)
    names = [n for n in (mine | theirs) if mine.get(n) != theirs.get(n)]
    return f": they differ in {', '.join(names)}"


def _entry(end: PendingOp | P2POp) -> PendingOp:
    entry = end if isinstance(end, PendingOp) else end.entry
    assert entry is not None
    return entry


def _rank(end: PendingOp | P2POp) -> int:
    return _entry(end).rank


def _where(end: PendingOp | P2POp) -> Where:
    return end.where
