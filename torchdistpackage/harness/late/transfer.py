"""How the data of a call travels: between real peers over gloo, or from a rank that is all ranks.

A transfer begins when its call is issued, from copies of the inputs, and waits for
no one, as a kernel on a device does. Only who asks for it waits.
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
    """Data under way. rooms: what comes from each rank, or message; full after `wait()`.

    keep: what is sent. got: bytes, which become the tensors `into`.
    """

    def __init__(
        self,
        rooms: Parts,
        works: Sequence[dist.Work] = (),
        keep: object = None,
        got: Tensor | None = None,
        into: Sequence[Tensor] = (),
    ):
        self.rooms, self._works, self._keep = rooms, works, keep
        self._got, self._into = got, into
        self._waiter: Future | None = None

    def wait(self) -> None:
        if self._waiter is not None:
            self._waiter.result()
        else:
            self._wait_for_works()
        self._keep, at = None, 0
        for room in map(_bytes, self._into):
            room.copy_(self._got[at : at + len(room)])
            at += len(room)

    def is_ready(self, patience_s: float) -> bool:
        """Whether `wait` returns at once. gloo does not report messages, so a thread waits."""
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

    def _wait_for_works(self) -> None:
        for work in self._works:
            work.wait()

    def _await(self, waiter: Future) -> None:
        try:
            waiter.set_result(self._wait_for_works())
        except BaseException as error:  # it is the caller's
            waiter.set_exception(error)


class Peers:
    """Real ones, over a gloo group of the same ranks that no one else uses."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        self._rank, self._size = rank, size
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout) if size > 1 else None

    def begin(self, sends: Parts, likes: Parts) -> Transfer:
        """sends[i] go to rank i, tensors like likes[i] come from it."""
        rooms = [[torch.empty_like(x, memory_format=_DENSE) for x in parts] for parts in likes]
        # at the root of a broadcast there is no room
        for x, room in zip(sends[self._rank], rooms[self._rank], strict=False):
            room.view(-1).copy_(x.detach().reshape(-1))
        if self._size == 1:
            return Transfer(rooms)
        others = [i for i in range(self._size) if i != self._rank]
        going, coming = (
            [sum(x.nbytes for x in tensors) * (i in others) for i, tensors in enumerate(parts)]
            for parts in (sends, rooms)
        )
        # one collective whatever the call is: bytes of any dtype, any number to any rank
        parts = [_bytes(x.detach().clone(memory_format=_DENSE)) for i in others for x in sends[i]]
        sent = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        got = torch.empty(sum(coming), dtype=torch.uint8)
        work = self.gloo.alltoall_base(got, sent, coming, going)
        return Transfer(rooms, [work], sent, got, [x for i in others for x in rooms[i]])

    def post(self, messages: Sequence[Posted]) -> Transfer:
        """Messages to and from peers; those of a pair meet in order, as NCCL knows no tags."""
        rooms, works = [], []
        for what, x, peer in messages:
            room = x.detach().clone(memory_format=_DENSE)
            rooms.append([room])
            function = self.gloo.send if what == "send" else self.gloo.recv
            works.append(function([room], peer, 0))
        return Transfer(rooms, works, rooms)


class Mirror:
    """One process is rank `rank` of `size`, and all others hold what it holds."""

    gloo = None

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size
        self._sent: deque[Tensor] = deque()

    def begin(self, sends: Parts, likes: Parts) -> Transfer:
        mine = sends[self._rank]
        rooms = [zip(mine or parts, parts, strict=False) for parts in likes]
        return Transfer([[_fitted(x, like) for x, like in pairs] for pairs in rooms])

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
