"""How the keys and values of other ranks come to the queries, and gradients back.

`Ring` is one hop after another: in hop h a rank gets from the rank h places before it, in one batch
of messages, what its queries see of that rank's part. The next hop travels while this one is
computed. Each rank sends its own part and no part is passed on, so what a mask hides from a rank is
not sent to it. In a backward keys and values travel once more, which saves the memory of all of
them, and the gradients of a hop go back while the next one is computed.

`GatheredKeys` is one all-gather, under way while a rank's own part is computed, and in the backward
a reduce-scatter. `Alone` is for a part that is the whole sequence.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.p2p import Post
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.work import Work
from torchdistpackage.parallel.context.merge import Tasks
from torchdistpackage.parallel.context.order import Ranges, joined, length
from torchdistpackage.parallel.context.visibility import (
    Visibility,
    needed,
    places,
    tasks_of,
    tiled,
)

Pair = tuple[Tensor, Tensor]
"""Keys and values (B, h, T, D), or their gradients."""
Forward = Callable[[Tasks, Tensor, Tensor], None]
"""Scores tasks of a part, given its keys and values."""
Backward = Callable[[Tasks, Tensor, Tensor], Pair]
"""The gradients of the keys and values of a part, of at least float32."""


class KeyExchange(Protocol):
    """Calls back with every part of which this rank's queries see some, in the same order both
    ways; `run_backward` returns the gradients of my own keys and values."""

    def run_forward(self, k: Tensor, v: Tensor, forward: Forward) -> None: ...

    def run_backward(self, k: Tensor, v: Tensor, backward: Backward) -> Pair: ...


class Alone:
    """The whole sequence is here, `ranges` of it in this order."""

    def __init__(self, ranges: Ranges, visibility: Visibility):
        positions = tiled(ranges, visibility)
        self._tasks = tasks_of(positions, positions, visibility)

    def run_forward(self, k: Tensor, v: Tensor, forward: Forward) -> None:
        forward(self._tasks, k, v)

    def run_backward(self, k: Tensor, v: Tensor, backward: Backward) -> Pair:
        return backward(self._tasks, k, v)


@dataclass(frozen=True)
class Hop:
    """What goes to global rank `target` of my part, and what comes from `source` of its own.

    sent: slices of my part. num_received: positions that come. tasks: over what comes.
    """

    target: int
    source: int
    sent: tuple[slice, ...]
    num_received: int
    tasks: Tasks


@dataclass
class _HopMessages:
    """Messages under way: keys and values of one hop, and gradients of an earlier one."""

    work: Work
    parts: Pair | None = None
    grads: Pair | None = None
    sent: tuple[slice, ...] = ()

    def wait(self) -> None:
        self.work.wait()

    def add_gradients(self, dk: Tensor, dv: Tensor) -> None:
        """Those that came for the slices of my part that I had sent."""
        for total, came in zip((dk, dv), self.grads or (), strict=False):
            start = 0
            for span in self.sent:
                stop = start + span.stop - span.start
                total[:, :, span] += came[:, :, start:stop]
                start = stop


class Ring:
    """parts: the ranges of every rank of the group."""

    def __init__(self, group: Group, parts: tuple[Ranges, ...], visibility: Visibility):
        self._group = ref(group)  # plans are kept for a group, which they must not keep
        ranks, mine, size = primitives.ranks_of(group), group.rank(), group.size()
        positions = [tiled(ranges, visibility) for ranges in parts]
        where = dict(zip(positions[mine], places(positions[mine]), strict=True))
        self._own = tasks_of(positions[mine], positions[mine], visibility)
        self.hops: list[Hop] = []
        for step in range(1, size):
            target, source = (mine + step) % size, (mine - step) % size
            seen = needed(positions[target], positions[mine], visibility)
            sent = joined(range(where[each].start, where[each].stop) for each in seen)
            came = needed(positions[mine], positions[source], visibility)
            self.hops.append(
                Hop(
                    ranks[target],
                    ranks[source],
                    tuple(slice(each.start, each.stop) for each in sent),
                    length(came),
                    tasks_of(positions[mine], came, visibility),
                )
            )

    def run_forward(self, k: Tensor, v: Tensor, forward: Forward) -> None:
        coming = self._post(k, v, 0)
        forward(self._own, k, v)
        for number, hop in enumerate(self.hops):
            coming.wait()
            here, coming = coming.parts, self._post(k, v, number + 1)
            if hop.tasks:
                forward(hop.tasks, *here)

    def run_backward(self, k: Tensor, v: Tensor, backward: Backward) -> Pair:
        coming = self._post(k, v, 0)
        dk, dv = backward(self._own, k, v)
        grads: Pair | None = None
        for number, hop in enumerate(self.hops):
            coming.wait()
            coming.add_gradients(dk, dv)
            here, coming = coming.parts, self._post(k, v, number + 1, grads, back=True)
            grads = backward(hop.tasks, *here) if hop.tasks else None
        coming.wait()
        coming.add_gradients(dk, dv)
        coming = self._post(k, v, len(self.hops) + 1, grads, back=True)
        coming.wait()
        coming.add_gradients(dk, dv)
        return dk, dv

    def _post(
        self, k: Tensor, v: Tensor, number: int, grads: Pair | None = None, *, back: bool = False
    ) -> _HopMessages:
        """Begin hop `number` and, on the way `back`, send the gradients of the hop two before it.

        Between two ranks gradients come first, on both sides: messages of a pair meet in order.
        """
        post, batch = Post(self._group()), _HopMessages(Work())
        if back and 0 <= number - 2 < len(self.hops):
            hop = self.hops[number - 2]
            if grads is not None:
                post.send([_packed(grads, (slice(None),), k.dtype)], hop.source)
            if hop.sent:
                num = sum(span.stop - span.start for span in hop.sent)
                flat, batch.grads = _room(k, v, num)
                batch.sent = hop.sent
                post.receive([flat], hop.target)
        if number < len(self.hops):
            hop = self.hops[number]
            if hop.sent:
                post.send([_packed((k, v), hop.sent, k.dtype)], hop.target)
            flat, batch.parts = _room(k, v, hop.num_received)
            post.receive([flat], hop.source)
        batch.work = post.go()
        return batch


class GatheredKeys:
    """parts: the ranges of every rank of the group."""

    def __init__(self, group: Group, parts: tuple[Ranges, ...], visibility: Visibility):
        self._group, mine = ref(group), group.rank()
        positions = [tiled(ranges, visibility) for ranges in parts]
        self._sizes = tuple(length(ranges) for ranges in parts)
        self._own = tasks_of(positions[mine], positions[mine], visibility)
        before, after = (
            tuple(each for ranges in some for each in ranges)
            for some in (positions[:mine], positions[mine + 1 :])
        )
        start, stop = sum(self._sizes[:mine]), sum(self._sizes[: mine + 1])
        self._others = (
            (slice(0, start), tasks_of(positions[mine], before, visibility)),
            (slice(stop, sum(self._sizes)), tasks_of(positions[mine], after, visibility)),
        )

    def run_forward(self, k: Tensor, v: Tensor, forward: Forward) -> None:
        works = self._begin(k), self._begin(v)
        forward(self._own, k, v)
        whole_k, whole_v = (work.wait().movedim(0, 2) for work in works)
        for span, tasks in self._others:
            if tasks:
                forward(tasks, whole_k[:, :, span], whole_v[:, :, span])

    def run_backward(self, k: Tensor, v: Tensor, backward: Backward) -> Pair:
        works = self._begin(k), self._begin(v)
        own = backward(self._own, k, v)
        wholes = [work.wait().movedim(0, 2) for work in works]
        before, after = (
            backward(tasks, *(whole[:, :, span] for whole in wholes))
            for span, tasks in self._others
        )
        return tuple(  # type: ignore[return-value]
            primitives.reduce_scatter(
                torch.cat(parts, 2).movedim(2, 0).contiguous(), self._group(), self._sizes
            ).movedim(0, 2)
            for parts in zip(before, own, after, strict=True)
        )

    def _begin(self, x: Tensor) -> Work:
        """(S_local, B, h, D) of each rank -> (S, B, h, D), begun."""
        rows = x.movedim(2, 0).contiguous()
        return primitives.all_gather(rows, self._group(), self._sizes, async_op=True)


def _packed(pair: Pair, sent: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
    """What goes of both, as one message: each wakes a thread of gloo's on either side."""
    parts = [[x[:, :, span] for span in sent] for x in pair]
    flat, rooms = _room(*pair, sum(part.shape[2] for part in parts[0]), dtype)
    for room, some in zip(rooms, parts, strict=True):
        start = 0
        for part in some:
            room[:, :, start : start + part.shape[2]] = part
            start += part.shape[2]
    return flat


def _room(k: Tensor, v: Tensor, num: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Pair]:
    """Memory for `num` positions of both, and what it is of each."""
    shapes = [(*x.shape[:2], num, x.shape[3]) for x in (k, v)]
    sizes = [math.prod(shape) for shape in shapes]
    flat = k.new_empty(sum(sizes), dtype=dtype)
    first, second = flat.split(sizes)
    return flat, (first.view(shapes[0]), second.view(shapes[1]))
