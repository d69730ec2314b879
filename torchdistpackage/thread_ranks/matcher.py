"""Matching of all ranks' calls: one order in each group, and no cycle of waits. No torch.

A matcher completes nothing early. A collective is done when all members have entered it, and a
message when its receive has been posted. The calls of a rank on a group are done in the order in
which it issued them, as on the one stream that NCCL gives a group. So a program that passes here
also passes on transports that buffer.

Groups may share their queues (`harness/lint`): then all calls of a rank are done in one order.
Messages may have a channel of their own, such as headers that travel through host memory: they are
done in order from one rank to another, and no other call waits for them.
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
"""The stack of a call: (file, line, function), innermost first."""


@dataclass(frozen=True, slots=True)
class OpSignature:
    """An operation with the facts, such as shapes, on which its ranks must agree."""

    operation: str
    facts: Facts = ()

    def __str__(self) -> str:
        shown = " ".join(f"{name} {_shown(value)}" for name, value in self.facts)
        return f"{self.operation} ({shown})" if shown else self.operation


CREATION = OpSignature("new_group")
"""The call in which members create a group."""
SPLIT, START = OpSignature("split of the world"), OpSignature("start of the step")
"""Calls of all ranks: in a split each rank creates one group or none; at the start all groups
exist."""


class LintGroup:
    """The ranks of one group, and the unfinished calls of each.

    name: its name in messages, such as `data`. num_calls, num_messages: collectives and messages
    that have met. queues: the queue of each rank, if the group shares them with others. in_host:
    its calls do not run on a device. lazy: it connects at first use (`harness/lint`), except for
    `eager` ranks, which connected at its creation.
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
        """Restart the numbers of calls at 1; no call may be unfinished."""
        self.issued = dict.fromkeys(self.ranks, 0)
        self.num_calls = self.num_messages = 0

    def queue_of(self, entry: "PendingOp") -> "deque[PendingOp]":
        """Return the queue that holds an entry."""
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

    call: the collective; None for messages. number: its position among the group's collectives,
    from 1. num_open: number of its messages that have not met. channel: as the module's docstring
    says. is_batch: one call issued all its messages.
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
    """An error: two ranks are in different calls, or expect different data as `what` says."""

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
        """The entry that each waiting rank waits for, by rank."""
        self.ended: set[int] = set()

    def issue(self, entry: PendingOp) -> None:
        """Append an entry to the calls that its rank has issued on the group.

        Raises:
            Disagreement: another member has issued a different call at this position.
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

        Raises:
            Disagreement: the facts at its other end differ.
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
        """Return the first unfinished entry of each queue, in order of ranks."""
        queues = [q for group in groups for q in (*group.queues.values(), *group.channels.values())]
        heads = [queue[0] for queue in queues if queue]
        return sorted(heads, key=lambda entry: entry.rank)

    def _activate(self, heads: list[PendingOp]) -> None:
        """Try to complete entries at the head of their queues, and then those behind them."""
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
        """Complete a collective that all members have entered, if it is first in all queues."""
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
        """Complete a message if both ends are first in their queues."""
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
        """Return the message that this one matches, or None; a receive may take any source."""
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
        """Mark an entry as done, and add the next one of its queue to `heads`."""
        queue = entry.group.queue_of(entry)
        queue.popleft()
        entry.done = True
        self._done(entry)
        if queue:
            heads.append(queue[0])


def _shown(value: object) -> str:
    """Return the text of a fact."""
    if isinstance(value, tuple):
        members = cast(tuple[object, ...], value)
        return f"[{', '.join(map(_shown, members))}]"
    return str(value)


# -- where a call was made -----------------------------------------------------------------

_HERE = str(Path(__file__).parent)
_TORCH = str(Path("site-packages", "torch", "distributed"))


def stack_here() -> tuple[Where, object]:
    """Return the caller's stack, innermost first, and the frame of its batch of messages, or None.

    torch issues the messages of a batch one by one, so the frame tells which belong together.
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
