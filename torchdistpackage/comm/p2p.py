"""Messages between two ranks, posted together.

On gloo a rank's notice that it can receive queues behind what it is sending. So if a send is large,
receives are posted first, which uses both directions of the link. If all sends are small they go
first, which saves the peer a wait (see benchmarks/pipeline).
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm import debug_checks
from torchdistpackage.comm.backends import require_host_memory
from torchdistpackage.comm.dtypes import in_place_of, to_bytes
from torchdistpackage.comm.flight_recorder import GROUP, Call, recorder
from torchdistpackage.comm.group_state import GroupState, state_of
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.work import Work, failed
from torchdistpackage.errors import CommError

SMALL_BYTES = 64 * 1024
"""Size up to which a message fits a socket's buffers, so that its send does not delay a receive."""


def send(x: Tensor, group: Group, target: int) -> None:
    """Send `x` to global rank `target`, which calls `receive` with a tensor of its shape and dtype.

    Raises:
        CommError: `target` is not another rank of the group, or the back end failed.
    """
    if recorder.checks:
        _peer(group, target, "send to")
        debug_checks.agree_messages(group, [("send", x, target)])
    # returns when `x` may be changed again, as torch's send does
    start_send(x, group, target).wait()


def receive(x: Tensor, group: Group, source: int) -> Tensor:
    """Fill `x` with the message of global rank `source`, and return it.

    Raises:
        CommError: `source` is not another rank of the group, or the back end failed.
    """
    if recorder.checks:
        _peer(group, source, "receive from")
        debug_checks.agree_messages(group, [("receive", x, source)])
    # returns when the message is in `x`, as torch's recv does
    return start_receive(x, group, source).wait()


def start_send(x: Tensor, group: Group, target: int) -> Work:
    """Start to send; `x` must not change until `wait()`.

    NCCL runs calls in order, so two ranks that both send first and then receive deadlock there:
    post both in one `Post`.
    """
    peer = _peer(group, target, "send to")
    state = state_of(group)
    if state.direct and not x.is_cpu:
        require_host_memory("send", group, x)
    call = recorder.begin_message("send", state, x, target, recorder.action)
    try:
        work = group.send([to_bytes(x)], peer, 0)
    except RuntimeError as error:
        raise failed(call, error) from error
    return Work(x, (work,), (call,), None, call[GROUP].limit)


def start_receive(x: Tensor, group: Group, source: int) -> Work:
    """Start to receive; `x` must not be read until `wait()`."""
    peer = _peer(group, source, "receive from")
    state = state_of(group)
    if state.direct and not x.is_cpu:
        require_host_memory("receive", group, x)
    # a tensor that is not contiguous, or that travels as bytes, arrives in a separate buffer
    buffer = to_bytes(x)
    call = recorder.begin_message("receive", state, x, source, recorder.action)
    try:
        work = group.recv([buffer], peer, 0)
    except RuntimeError as error:
        raise failed(call, error) from error
    return Work(x, (work,), (call,), in_place_of(x, buffer), call[GROUP].limit)


_Posted = tuple[str, Tensor, int, object]
"""(`send` or `receive`, tensor, global rank of the peer, the schedule's action)."""


class Post:
    """Messages of one rank that `go()` posts together."""

    __slots__ = ("_group", "_receives", "_sends", "_state", "_work")

    def __init__(self, group: Group, timeout_s: float | None = None):
        self._group, self._state = group, state_of(group)
        self._work = Work(limit=_limit(self._state, timeout_s))
        self._receives: list[_Posted] = []
        self._sends: list[_Posted] = []

    def receive(self, tensors: Sequence[Tensor | None], source: int) -> Work:
        """Add receives from global rank `source` into contiguous buffers; empty ones are
        skipped.
        """
        for x in tensors:
            if x is not None and x.numel():
                self._receives.append(("receive", to_bytes(x), source, recorder.action))
        return self._work

    def send(self, tensors: Sequence[Tensor | None], target: int) -> Work:
        """Add sends to global rank `target`; the tensors must not change until the work is done."""
        for x in tensors:
            if x is not None and x.numel():
                self._sends.append(("send", to_bytes(x), target, recorder.action))
        return self._work

    def go(self) -> Work:
        """Start all messages; in debug mode compare them with the peers' first.

        The comparison waits until the peers reach all of these messages. So two messages must be in
        two posts if a peer needs one of them before it can create the other.
        """
        messages = self._sends + self._receives
        for _, x, _, _ in self._sends:
            if x.nbytes > SMALL_BYTES:
                messages = self._receives + self._sends
                break
        work = self._work
        if not messages:
            return work
        if recorder.checks:
            debug_checks.agree_messages(self._group, [message[:3] for message in messages])
        record, state = recorder.begin_message, self._state
        calls = [
            record(direction, state, x, peer, action) for direction, x, peer, action in messages
        ]
        try:
            work._works = self._issue(messages)
        except RuntimeError as error:
            raise failed(calls[0], error) from error
        work._keep, work._calls = messages, calls
        return work

    def _issue(self, messages: list[_Posted]) -> list[dist.Work]:
        """Post the messages on the group, and return their works."""
        group, ranks = self._group, self._state.ranks
        if not self._state.direct:
            # One batch, which NCCL runs as one operation. It may return fewer works than messages.
            return dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend if direction == "send" else dist.irecv, x, peer, group)
                    for direction, x, peer, _ in messages
                ]
            )
        for direction, x, _, _ in messages:
            require_host_memory(direction, group, x)
        # what torch's batch does on gloo, without its checks
        return [
            group.send([x], ranks.index(peer), 0)
            if direction == "send"
            else group.recv([x], ranks.index(peer), 0)
            for direction, x, peer, _ in messages
        ]


_Issue = Callable[[list[Tensor], int, int], dist.Work]


class P2PChannel:
    """A channel whose messages are posted one by one, for gloo, where none blocks another.

    The k-th `send` to a rank meets its k-th `receive` from this one. Tensors are contiguous, of
    plain dtypes, and need no gradient (`dtypes.to_bytes`).

    tag: messages with different tags do not match.
    down: a twin of the group (`groups.make_duplex_groups`) for messages to lower ranks. With one
        connection for both directions, a rank that posts would wait while gloo reads from it.
    """

    __slots__ = ("_issue", "_state", "_tag", "_timeout")

    def __init__(
        self,
        group: Group,
        timeout_s: float | None = None,
        *,
        tag: int = 0,
        down: Group | None = None,
    ):
        self._state, index, down = state_of(group), group.rank(), down or group
        self._tag, self._timeout = tag, _limit(self._state, timeout_s)
        # look up the bound methods once, not for every message
        self._issue: dict[tuple[str, int], tuple[int, _Issue]] = {}
        for i, rank in enumerate(self._state.ranks):
            self._issue["receive", rank] = i, (down if i > index else group).recv
            self._issue["send", rank] = i, (down if i < index else group).send

    @property
    def is_direct(self) -> bool:
        """True if the group's transport supports such messages."""
        return self._state.direct

    def limit(self, timeout_s: float | None) -> None:
        """Set how long a message may take from now on."""
        self._timeout = _limit(self._state, timeout_s)

    def receive(self, tensors: Sequence[Tensor], source: int) -> Work:
        """Start to receive into these buffers from global rank `source`."""
        return self._begin("receive", tensors, source)

    def send(self, tensors: Sequence[Tensor], target: int) -> Work:
        """Start to send to global rank `target`; the tensors must not change until the
        work is done.
        """
        return self._begin("send", tensors, target)

    def _begin(self, direction: str, tensors: Sequence[Tensor], peer: int) -> Work:
        """Record and post messages to or from a peer."""
        state, action, (index, issue) = self._state, recorder.action, self._issue[direction, peer]
        calls: list[Call] = []
        works: list[dist.Work] = []
        for x in tensors:
            calls.append(recorder.begin_message(direction, state, x, peer, action))
            try:
                works.append(issue([x], index, self._tag))
            except RuntimeError as error:
                raise failed(calls[-1], error) from error
        return Work(None, works, calls, None, self._timeout, tensors)


def _limit(state: GroupState, timeout_s: float | None) -> timedelta | None:
    """Return the limit of a message, None for a device queue."""
    # on NCCL a wait with a limit would block the host, and its watchdog has a limit already
    if not state.direct:
        return None
    return timedelta(seconds=timeout_s) if timeout_s else state.limit


def _peer(group: Group, rank: int, direction: str) -> int:
    """Return the index of global `rank` in the group; refuse a rank that is not a peer."""
    ranks = state_of(group).ranks
    if rank not in ranks or ranks.index(rank) == group.rank():
        raise CommError(
            f"cannot {direction} rank {rank}: it is not another rank of the group of ranks "
            f"{ranks}; name one of them (ranks here are global)"
        )
    return ranks.index(rank)
