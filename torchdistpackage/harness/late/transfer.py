"""How the data of a call travels: between real peers over gloo, or from a rank that is all ranks.

One rule: a transfer begins when its call is issued, from copies of the inputs, and waits for
nobody, as a kernel on a device does. Only who asks for it waits.
"""

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

Parts = Sequence[Sequence[Tensor]]
"""For each rank of a group, in its order, the tensors that go to it or come from it."""
Posted = tuple[str, Tensor, int]
"""(`send` or `receive`, tensor, place of the peer in the group)"""


class Transfer:
    """Data under way. rooms: what comes from each rank, or message; full after `wait()`."""

    def __init__(self, rooms: Sequence[Sequence[Tensor]], works=(), keep: object = None):
        self.rooms, self._works, self._keep = rooms, works, keep
        self._waiter: Future | None = None

    def wait(self) -> None:
        if self._waiter is not None:
            self._waiter.result()
        else:
            for work in self._works:
                work.wait()
        self._keep = None

    def is_ready(self, patience_s: float) -> bool:
        """Whether `wait` returns at once. gloo does not tell of messages, so a thread waits."""
        if not self._works:
            return True
        if self._waiter is None:
            self._waiter = Future()
            threading.Thread(target=self._await, args=(self._waiter,), daemon=True).start()
        try:
            self._waiter.exception(patience_s)
        except TimeoutError:
            return False
        return True

    def _await(self, waiter: Future) -> None:
        try:
            for work in self._works:
                work.wait()
            waiter.set_result(None)
        except BaseException as error:  # it is the caller's
            waiter.set_exception(error)


class Peers:
    """Real ones, over a gloo group of the same ranks that nobody else uses."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        self._rank, self._size = rank, size
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout) if size > 1 else None

    def begin(self, sends: Parts, likes: Parts) -> Transfer:
        """sends[i] go to rank i, tensors like likes[i] come from it."""
        rooms = [[torch.empty_like(x, memory_format=_DENSE) for x in parts] for parts in likes]
        for x, room in zip(sends[self._rank], rooms[self._rank], strict=False):
            room.view(-1).copy_(
                x.detach().reshape(-1)
            )  # neither is there at the root of a broadcast
        if self._size == 1:
            return Transfer(rooms)
        others = [i for i in range(self._size) if i != self._rank]
        going, coming = self._lengths(sends), self._lengths(rooms)
        # one collective whatever the call is: bytes of any dtype, any number to any rank
        parts = [_bytes(x.detach().clone(memory_format=_DENSE)) for i in others for x in sends[i]]
        sent = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        got = torch.empty(sum(coming), dtype=torch.uint8)
        work = self.gloo.alltoall_base(got, sent, coming, going)
        return _Unpacking([rooms[i] for i in others], got, rooms, work, sent)

    def post(self, messages: Sequence[Posted]) -> Transfer:
        """Messages to and from peers; those of a pair meet in order, as NCCL knows no tags."""
        rooms, works = [], []
        for what, x, peer in messages:
            room = x.detach().clone(memory_format=_DENSE)
            rooms.append([room])
            function = self.gloo.send if what == "send" else self.gloo.recv
            works.append(function([room], peer, 0))
        return Transfer(rooms, works, rooms)

    def _lengths(self, parts: Parts) -> list[int]:
        return [
            0 if i == self._rank else sum(x.numel() * x.itemsize for x in tensors)
            for i, tensors in enumerate(parts)
        ]


class _Unpacking(Transfer):
    """Bytes that become tensors."""

    def __init__(self, into: Parts, got: Tensor, rooms: Parts, work: dist.Work, sent: Tensor):
        super().__init__(rooms, [work], sent)
        self._into, self._got = into, got

    def wait(self) -> None:
        super().wait()
        at = 0
        for x in (x for tensors in self._into for x in tensors):
            room = _bytes(x)
            room.copy_(self._got[at : at + len(room)])
            at += len(room)


class Mirror:
    """One process is rank `rank` of `size`, and all others hold what it holds."""

    gloo = None

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size
        self._sent: deque[Tensor] = deque()

    def begin(self, sends: Parts, likes: Parts) -> Transfer:
        mine = sends[self._rank]
        return Transfer(
            [
                [_fitted(mine[k] if mine else like, like) for k, like in enumerate(parts)]
                for parts in likes
            ]
        )

    def post(self, messages: Sequence[Posted]) -> Transfer:
        """A rank receives what it has sent itself, in that order."""
        rooms = [[x.detach().clone()] for _, x, _ in messages]
        self._sent += [room for (what, _, _), (room,) in zip(messages, rooms, strict=True)
                       if what == "send"]  # fmt: skip
        for (what, x, _), room in zip(messages, rooms, strict=True):
            if what == "receive" and self._sent:
                room[0] = _fitted(self._sent.popleft(), x)
        return Transfer(rooms)


_DENSE = torch.contiguous_format


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _fitted(x: Tensor, like: Tensor) -> Tensor:
    """A copy of `x` in the shape of `like`: uneven parts of a mirrored rank are its own, cut or
    filled up with zeros."""
    flat, number = x.detach().reshape(-1), like.numel()
    if len(flat) < number:
        flat = torch.cat([flat, flat.new_zeros(number - len(flat))])
    return flat[:number].clone().view(like.shape)
