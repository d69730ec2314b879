"""Matching of all ranks' calls: one order in each group, and no circle of waits.

A matcher completes nothing early. A collective is done when all members have entered it, and a
message when its receive has been posted. Calls of a rank on a group are done in the order of their
issue, as on the one stream that NCCL gives a group. A transport with buffers only does more. No
torch.

Groups may share their queues (`harness/lint`): then all that a rank has issued is done in one
order. Messages may have a channel of their own, as descriptions have that go through host memory:
between two ranks one way they are done in order, and hold up nothing else.
"""

import inspect
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import cast

Facts = tuple[tuple[str, object], ...]
Where = tuple[tuple[str, int, str], ...]
"""The place of a call: (file, line, function) from the inside out."""


@dataclass(frozen=True, slots=True)
class OpSignature:
    """An operation and all facts about it on which the ranks that meet in it must agree."""

    operation: str
    facts: Facts = ()

    def __str__(self) -> str:
        shown = " ".join(f"{name} {_shown(value)}" for name, value in self.facts)
        return f"{self.operation} ({shown})" if shown else self.operation


CREATION = OpSignature("new_group")
"""A group is made by its members."""
SPLIT, START = OpSignature("split of the world"), OpSignature("start of the step")
"""Operations of the world: all ranks make one group each, or none; all ranks have their groups."""


class LintGroup:
    """The ranks of one group, and the calls that each of them has issued on it and that are not
    done.

    name: what people call it, such as `data`. num_calls: collectives that met; num_messages alike.
    queues: of each rank, where they are not this group's alone. in_host: its calls
    take no part on a device. lazy: it connects at first use (`harness/lint`), but for ranks that
    are `eager`, which had the communicator at once.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        name: str = "",
        queues: "Queues | None" = None,
        lazy: bool = False,
        in_host: bool = False,
    ):
        self.ranks, self.name, self.lazy, self.in_host = tuple(ranks), name, lazy, in_host
        self.eager: set[int] = set()
        self.queues: Queues = {rank: deque() for rank in ranks} if queues is None else queues
        self.channels: dict[tuple[int, Hashable], deque[PendingOp]] = {}
        self.issued = dict.fromkeys(ranks, 0)
        self.meetings: dict[int, dict[int, PendingOp]] = {}
        self.posted: defaultdict[Hashable, deque[P2POp]] = defaultdict(deque)
        self.from_anybody = False
        self.num_calls = self.num_messages = 0

    def count_anew(self) -> None:
        """Number the next call of each rank 1 again; nothing may be under way."""
        self.issued = dict.fromkeys(self.ranks, 0)
        self.num_calls = self.num_messages = 0

    def queue_of(self, entry: "PendingOp") -> "deque[PendingOp]":
        """Return the queue in which an entry of its rank stands."""
        if entry.channel is None:
            return self.queues[entry.rank]
        return self.channels.setdefault((entry.rank, entry.channel), deque())

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        return f"group {self.name} (ranks {ranks})" if self.name else f"group of ranks {ranks}"


@dataclass(slots=True, eq=False)
class P2POp:
    """One end of a message: rank `source` (None: any) to rank `target`, both global."""

    call: OpSignature
    source: int | None
    target: int
    tag: int = 0
    where: Where = ()
    payload: object = None
    active: bool = field(default=False, init=False)
    done: bool = field(default=False, init=False)
    entry: "PendingOp" = field(init=False)
    is_send: bool = field(init=False)
    key: Hashable = field(init=False)
    match_key: Hashable = field(init=False)

    def __post_init__(self) -> None:
        self.is_send = self.call.operation == "send"
        self.key = self.is_send, self.source, self.target, self.tag
        self.match_key = not self.is_send, self.source, self.target, self.tag

    @property
    def peer(self) -> int | None:
        """The rank at the other end; None: any."""
        return self.target if self.is_send else self.source


@dataclass(slots=True, eq=False)
class PendingOp:
    """A call of one rank on one group: a collective, or messages that go together.

    call: the collective; None for messages. number: of it among the group's collectives, from 1.
    num_open: its messages that have not met. channel: see the module. is_batch: its messages were
    given as one call, and not one by one.
    """

    rank: int
    group: LintGroup
    call: OpSignature | None = None
    num_open: int = 0
    where: Where = ()
    payload: object = None
    channel: Hashable = None
    is_batch: bool = False
    messages: list[P2POp] = field(default_factory=list[P2POp], init=False)
    number: int = field(default=0, init=False)
    done: bool = field(default=False, init=False)


Queues = Mapping[int, deque[PendingOp]]
"""Unfinished entries that each rank has issued, oldest first."""


class Disagreement(Exception):
    """An error of two ranks that meet in different calls; `what` says how if their facts do not."""

    def __init__(self, first: PendingOp | P2POp, second: PendingOp | P2POp, what: str = ""):
        super().__init__(first, second, what)
        self.first, self.second, self.what = first, second, what


class Matcher:
    """A board that takes entries, lets them meet, and reports when they are done.

    met: called with the entries of a collective in group order before any of them is done.
    matched: called with a send and its receive. done: called with each entry that is done.
    """

    def __init__(
        self,
        met: Callable[[list[PendingOp]], object] = lambda entries: None,
        matched: Callable[[P2POp, P2POp], object] = lambda send, receive: None,
        done: Callable[[PendingOp], object] = lambda entry: None,
    ):
        self._met, self._matched, self._done = met, matched, done
        self.waiting: dict[int, PendingOp] = {}
        """The entry that each waiting rank waits for."""
        self.ended: set[int] = set()

    def issue(self, entry: PendingOp) -> None:
        """Put an entry behind what its rank has issued on the group.

        Disagreement: it is not what another member has issued in its place.
        """
        group, rank = entry.group, entry.rank
        queue = group.queue_of(entry)
        queue.append(entry)
        if entry.call is not None:
            number = entry.number = group.issued[rank] + 1
            group.issued[rank] += 1
            meeting = group.meetings.setdefault(number, {})
            first = next(iter(meeting.values()), entry)
            if first.call != entry.call:
                raise Disagreement(first, entry)
            meeting[rank] = entry
            if queue[0] is entry:
                self._activate([entry])

    def post(self, entry: PendingOp, message: P2POp) -> None:
        """Add one of the messages that an entry announced when it was issued.

        Disagreement: its other end is not the same.
        """
        group = entry.group
        message.entry = entry
        entry.messages.append(message)
        group.posted[message.key].append(message)
        group.from_anybody |= message.source is None
        if group.queue_of(entry)[0] is entry:
            heads: list[PendingOp] = []
            message.active = True
            self._match(message, heads)
            self._activate(heads)

    def leftovers(self, groups: Sequence[LintGroup]) -> list[PendingOp]:
        """Return the entries that never met, of the lowest rank first."""
        queues = [q for group in groups for q in (*group.queues.values(), *group.channels.values())]
        heads = [queue[0] for queue in queues if queue]
        return sorted(heads, key=lambda entry: entry.rank)

    def _activate(self, heads: list[PendingOp]) -> None:
        """Let entries at the head of their queue meet, and then those behind them."""
        while heads:
            entry = heads.pop()
            if entry.done:
                continue
            if entry.call is not None:
                self._meet(entry, heads)
            for message in entry.messages:
                message.active = True
            for message in entry.messages:
                if not message.done:
                    self._match(message, heads)

    def _meet(self, entry: PendingOp, heads: list[PendingOp]) -> None:
        """Complete a collective if all members have entered it and it is at the head of all
        queues.
        """
        group = entry.group
        meeting = group.meetings[entry.number]
        if len(meeting) < len(group.ranks):
            return
        if any(group.queues[rank][0] is not other for rank, other in meeting.items()):
            return
        del group.meetings[entry.number]
        group.num_calls += 1
        self._met([meeting[rank] for rank in group.ranks])
        for other in meeting.values():
            self._finish(other, heads)

    def _match(self, message: P2POp, heads: list[PendingOp]) -> None:
        """Complete a message if both ends are at the head of their queues."""
        entry = message.entry
        posted = entry.group.posted
        other = self._other_end(message, entry.group)
        if other is None or not other.active or posted[message.key][0] is not message:
            return
        posted[message.key].popleft()
        posted[other.key].popleft()
        if message.call.facts != other.call.facts:
            raise Disagreement(other, message)
        send, receive = (message, other) if message.is_send else (other, message)
        entry.group.num_messages += 1
        self._matched(send, receive)
        for end in (other, message):
            end.done = True
            end.entry.num_open -= 1
            if not end.entry.num_open:
                self._finish(end.entry, heads)

    def _other_end(self, message: P2POp, group: LintGroup) -> P2POp | None:
        """Return the first message posted on the other side; a receive from anybody takes any."""
        keys = [message.match_key]
        if group.from_anybody and message.is_send:
            keys.append((False, None, message.target, message.tag))
        elif message.source is None:
            keys = [(True, rank, message.target, message.tag) for rank in group.ranks]
        for key in keys:
            if (queue := group.posted.get(key)) and queue[0].active:
                return queue[0]
        return None

    def _finish(self, entry: PendingOp, heads: list[PendingOp]) -> None:
        """Mark an entry as done, and let the one behind it come next."""
        queue = entry.group.queue_of(entry)
        queue.popleft()
        entry.done = True
        self._done(entry)
        if queue:
            heads.append(queue[0])


def _shown(value: object) -> str:
    """Return a fact as text."""
    if isinstance(value, tuple):
        members = cast(tuple[object, ...], value)
        return f"[{', '.join(map(_shown, members))}]"
    return str(value)


# -- where a call was made -----------------------------------------------------------------

_HERE = str(Path(__file__).parent)
_TORCH = str(Path("site-packages", "torch", "distributed"))


def stack_here() -> tuple[Where, object]:
    """Return the caller's stack from the inside out, and the frame of the batch a message is part
    of.

    torch hands the messages of a batch over one by one; its frame shows which belong together.
    """
    frames = list(_frames(inspect.currentframe()))
    batches = [frame for frame in frames if frame.f_code.co_name == "batch_isend_irecv"]
    return _shown_frames(frames), batches[-1] if batches else None


def stack_of(thread: threading.Thread) -> Where:
    """Return the stack of a thread at this moment."""
    return _shown_frames(_frames(sys._current_frames().get(thread.ident or 0)))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _shown_frames(frames: Iterable[FrameType]) -> Where:
    """Return the stack without the frames that carry a call."""
    return tuple(
        (file, frame.f_lineno, frame.f_code.co_name)
        for frame in frames
        if not (file := frame.f_code.co_filename).startswith((_HERE, threading.__file__))
        and _TORCH not in file
    )
