"""Messages between two ranks, posted together.

On gloo the notice that a rank is ready to receive queues behind what it has begun to send, so
where a send is large receives are posted first, which uses both directions of the link.
Small ones go out first instead: that saves the peer a wait (see benchmarks/pipeline.py).
"""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm import checking
from torchdistpackage.comm.pending import Pending, failed
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.record import LINE, STATE, WAITING, Call, calls
from torchdistpackage.comm.wire import as_moved, in_place_of
from torchdistpackage.errors import CommError

SMALL_BYTES = 64 * 1024
"""Up to here a message fits the buffers of a socket, and its send does not hold up a receive."""


def send(x: Tensor, group: Group, target: int) -> None:
    """Give `x` to global rank `target`, which calls `receive` with room of its shape and dtype.

    Raises:
        CommError: `target` is not another rank of the group, or the backend failed.
    """
    if calls.checks:
        _peer(group, target, "send to")
        checking.agree_messages(group, [("send", x, target)])
    start_send(x, group, target).wait()


def receive(x: Tensor, group: Group, source: int) -> Tensor:
    """Fill `x` with what global rank `source` sends; returns it.

    Raises:
        CommError: `source` is not another rank of the group, or the backend failed.
    """
    if calls.checks:
        _peer(group, source, "receive from")
        checking.agree_messages(group, [("receive", x, source)])
    return start_receive(x, group, source).wait()


def start_send(x: Tensor, group: Group, target: int) -> Pending:
    """`send`, begun; `x` must stay as it is until `wait()`.

    NCCL runs what is begun in order, so two ranks that both send and then receive wait for each
    other there: post both in one `Post`.
    """
    peer = _peer(group, target, "send to")
    call = calls.begin_message("send", calls.line(group), x, target, calls.action)
    try:
        work = group.send([as_moved(x)], peer, 0)
    except RuntimeError as error:
        raise failed(call, error) from error
    return Pending(x, (work,), call, None, call[LINE].limit)


def start_receive(x: Tensor, group: Group, source: int) -> Pending:
    """`receive`, begun; `x` must not be read until `wait()`."""
    peer = _peer(group, source, "receive from")
    # what is not contiguous, or of a dtype that travels as bytes, arrives in a room of its own
    room = as_moved(x)
    call = calls.begin_message("receive", calls.line(group), x, source, calls.action)
    try:
        work = group.recv([room], peer, 0)
    except RuntimeError as error:
        raise failed(call, error) from error
    return Pending(x, (work,), call, in_place_of(x, room), call[LINE].limit)


_Posted = tuple[str, Tensor, int, object]
"""(`send` or `receive`, tensor, global rank of the peer, the schedule's action)"""


class Flight:
    """Messages that were posted; `wait()` before reading, and before writing what was sent."""

    __slots__ = ("_calls", "_keep", "_timeout", "_works")

    def __init__(
        self,
        works: list[dist.Work],
        keep: list[_Posted],
        made: list[Call],
        timeout: timedelta | None,
    ):
        self._works, self._keep, self._calls, self._timeout = works, keep, made, timeout

    def wait(self) -> None:
        """On CUDA the current stream waits, not the host.

        Raises:
            CommError: a message failed, or did not come in time.
        """
        since_s = calls.clock_s()
        # NCCL runs a batch as one, and may give one work for all of its messages
        for call, work in zip(self._calls, self._works, strict=False):
            call[STATE] = WAITING
            try:
                work.wait() if self._timeout is None else work.wait(self._timeout)
            except RuntimeError as error:
                raise failed(call, error) from error
            call[STATE] = call[LINE].passed
        calls.waited_s += calls.clock_s() - since_s
        self._works, self._keep, self._calls = [], [], []


class Post:
    """Messages of one rank, to be posted together. All tensors contiguous, of plain dtypes."""

    def __init__(self, group: Group, timeout_s: float | None = None):
        self._group, self._line = group, calls.line(group)
        # with a limit, a wait on NCCL would block the host; its watchdog has the limit already
        limited = timeout_s is not None and self._line.direct
        self._timeout = timedelta(seconds=timeout_s) if limited and timeout_s else None
        self._receives: list[_Posted] = []
        self._sends: list[_Posted] = []

    def receive(self, tensors: Sequence[Tensor | None], source: int) -> None:
        """Room to be filled by global rank `source`; empty tensors travel too, as nothing."""
        for x in tensors:
            if x is not None and x.numel():
                self._receives.append(("receive", x, source, calls.action))

    def send(self, tensors: Sequence[Tensor | None], target: int) -> None:
        """Tensors for global rank `target`; they must stay as they are until `wait`."""
        for x in tensors:
            if x is not None and x.numel():
                sent = x.detach() if x.requires_grad else x
                self._sends.append(("send", sent.contiguous(), target, calls.action))

    def go(self) -> Flight:
        messages = self._sends + self._receives
        for _, x, _, _ in self._sends:
            if x.nbytes > SMALL_BYTES:
                messages = self._receives + self._sends
                break
        if not messages:
            return Flight([], [], [], None)
        if calls.checks:
            checking.agree_messages(self._group, [message[:3] for message in messages])
        begin, line = calls.begin_message, self._line
        made = [begin(what, line, x, peer, action) for what, x, peer, action in messages]
        try:
            works = self._issue(messages)
        except RuntimeError as error:
            raise failed(made[0], error) from error
        return Flight(works, messages, made, self._timeout)

    def _issue(self, messages: list[_Posted]) -> list[dist.Work]:
        group, ranks = self._group, self._line.ranks
        if not self._line.direct:
            # one batch, which NCCL runs as one: its number of works is its own
            return dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend if what == "send" else dist.irecv, x, peer, group)
                    for what, x, peer, _ in messages
                ]
            )
        # what torch's batch does on gloo, without its checks
        return [
            group.send([x], ranks.index(peer), 0)
            if what == "send"
            else group.recv([x], ranks.index(peer), 0)
            for what, x, peer, _ in messages
        ]


def _peer(group: Group, rank: int, what: str) -> int:
    """Position of global `rank` in the group."""
    ranks = calls.line(group).ranks
    if rank not in ranks or ranks.index(rank) == group.rank():
        raise CommError(
            f"cannot {what} rank {rank}: it is not another rank of the group of ranks {ranks}; "
            f"name one of them (ranks here are global)"
        )
    return ranks.index(rank)
