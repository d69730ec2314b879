"""Exchanges that bring the keys and values of other ranks to the queries, and gradients back.

`Ring` works in hops. In hop h a rank receives, in one batch of messages, the keys and values that
its queries see of the rank h places before it. The next hop travels while the rank computes this
one. Each rank sends its own part and passes nothing on, so it does not send what a mask hides. The
backward sends keys and values again, which saves the memory of keeping them, and returns the
gradients of a hop while it computes the next one. docs/context_parallel.md draws the hops of four
ranks. Where nothing is hidden, ranks pass parts on to the next one, so that a rank has two peers.

`GatheredKeys` makes one all-gather while a rank computes its own part, and a reduce-scatter in the
backward. `Alone` serves a rank that holds the full sequence.
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
"""Computes the scores of the tasks of a slice from its keys and values."""
Backward = Callable[[Tasks, Tensor, Tensor], Pair]
"""Returns the gradients of a slice's keys and values, in at least float32."""


class KeyExchange(Protocol):
    """An exchange that calls back with every slice that this rank's queries see.

    Forward and backward visit the slices in the same order. `run_backward` returns the gradients of
    this rank's own keys and values.
    """

    def run_forward(self, k: Tensor, v: Tensor, forward: Forward) -> None: ...

    def run_backward(self, k: Tensor, v: Tensor, backward: Backward) -> Pair: ...


class Alone:
    """No exchange: this rank holds the full sequence, its `ranges` in this order."""

    def __init__(self, ranges: Ranges, visibility: Visibility):
        positions = tiled(ranges, visibility)
        self._tasks = tasks_of(positions, positions, visibility)

    def run_forward(self, k: Tensor, v: Tensor, forward: Forward) -> None:
        forward(self._tasks, k, v)

    def run_backward(self, k: Tensor, v: Tensor, backward: Backward) -> Pair:
        return backward(self._tasks, k, v)


@dataclass(frozen=True)
class Hop:
    """One hop: this rank sends slices of its part to `target` and receives some of `source`'s.

    target, source: global ranks.
    sent: slices of this rank's part. num_received: number of positions received.
    tasks: the work on the received keys and values.
    """

    target: int
    source: int
    sent: tuple[slice, ...]
    num_received: int
    tasks: Tasks


@dataclass
class _HopMessages:
    """Messages in flight: keys and values of one hop, and gradients of an earlier one."""

    work: Work
    parts: Pair | None = None
    grads: Pair | None = None
    sent: tuple[slice, ...] = ()

    def wait(self) -> None:
        # the keys and values of the hop are attended to next
        self.work.wait()

    def add_gradients(self, dk: Tensor, dv: Tensor) -> None:
        """Add the received gradients to those slices of this rank that it had sent."""
        for total, received in zip((dk, dv), self.grads or (), strict=False):
            start = 0
            for span in self.sent:
                stop = start + span.stop - span.start
                total[:, :, span] += received[:, :, start:stop]
                start = stop


class Ring:
    """An exchange in hops; each slice comes directly from its owner.

    parts: the ranges of every rank of the group.
    """

    def __init__(self, group: Group, parts: tuple[Ranges, ...], visibility: Visibility):
        self._group = ref(group)  # weak: a cache keyed by the group holds this plan
        ranks, index, size = primitives.ranks_of(group), group.rank(), group.size()
        positions = [tiled(ranges, visibility) for ranges in parts]
        slices = dict(zip(positions[index], places(positions[index]), strict=True))
        self._own = tasks_of(positions[index], positions[index], visibility)
        # over NCCL each peer costs memory, so that neighbours alone are better where all is sent
        self._passes_on = size > 2 and visibility.shows_all
        self._next, self._before = ranks[(index + 1) % size], ranks[(index - 1) % size]
        self.hops: list[Hop] = []
        for step in range(1, size):
            target, source = (index + step) % size, (index - step) % size
            needed_slices = needed(positions[target], positions[index], visibility)
            sent = joined(range(slices[each].start, slices[each].stop) for each in needed_slices)
            received = needed(positions[index], positions[source], visibility)
            self.hops.append(
                Hop(
                    ranks[target],
                    ranks[source],
                    tuple(slice(each.start, each.stop) for each in sent),
                    length(received),
                    tasks_of(positions[index], received, visibility),
                )
            )

    def run_forward(self, k: Tensor, v: Tensor, forward: Forward) -> None:
        messages = self._post(k, v, 0)
        forward(self._own, k, v)
        for number, hop in enumerate(self.hops):
            # the keys of this hop travelled while the one before was computed
            messages.wait()
            # post the next hop before computing this one, so that it travels meanwhile
            parts = messages.parts
            sent = parts if self._passes_on and parts is not None else (k, v)
            messages = self._post(*sent, number + 1)
            if hop.tasks:
                forward(hop.tasks, *parts)

    def run_backward(self, k: Tensor, v: Tensor, backward: Backward) -> Pair:
        if self._passes_on:
            return self._run_backward_passing(k, v, backward)
        messages = self._post(k, v, 0)
        dk, dv = backward(self._own, k, v)
        grads: Pair | None = None
        for number, hop in enumerate(self.hops):
            # this hop needs its keys and values, and the gradients that came with them
            messages.wait()
            messages.add_gradients(dk, dv)
            # the gradients of the hop before leave together with the next keys and values
            parts, messages = messages.parts, self._post(k, v, number + 1, grads, back=True)
            grads = backward(hop.tasks, *parts) if hop.tasks else None
        # Two batches of gradients are left: those of the last hop but one are in flight, those of
        # the last hop have just been computed.
        messages.wait()
        messages.add_gradients(dk, dv)
        messages = self._post(k, v, len(self.hops) + 1, grads, back=True)
        # nothing is left to compute beside this last message
        messages.wait()
        messages.add_gradients(dk, dv)
        return dk, dv

    def _run_backward_passing(self, k: Tensor, v: Tensor, backward: Backward) -> Pair:
        """Return the gradients when slices are passed on.

        The gradients of a slice follow it from rank to rank. Each rank adds its own, and the last
        one is the neighbour of the owner.
        """
        messages = self._post(k, v, 0)
        dk, dv = backward(self._own, k, v)
        sums: Pair | None = None
        for number, hop in enumerate(self.hops):
            # the keys and values of this hop, which are also passed on
            messages.wait()
            parts = messages.parts
            assert parts is not None
            messages = self._pass(parts, number, sums)
            sums = backward(hop.tasks, *parts)
            messages.wait()  # the sums that came travelled while this hop was computed
            messages.add_gradients(*sums)
        messages = self._pass((dk, dv), len(self.hops), sums)
        # nothing is left to compute: the sums of this rank's own slice come from the last rank
        messages.wait()
        messages.add_gradients(dk, dv)
        return dk, dv

    def _pass(self, parts: Pair, number: int, sums: Pair | None) -> _HopMessages:
        """Pass on the gradient sums of the slice of the hop before `number`, and `parts`, if a hop
        follows.

        The sums travel in their own dtype, because each rank would round them again. The received
        sums belong to `parts`.
        """
        post, batch = Post(self._group()), _HopMessages(Work())
        if sums is not None:
            post.send([_packed(sums, (slice(None),), sums[0].dtype)], self._next)
            num = parts[0].shape[2]
            flat, batch.grads = _room(*sums, num)
            batch.sent = (slice(0, num),)
            post.receive([flat], self._before)
        if number + 1 < len(self.hops):
            post.send([_packed(parts, (slice(None),), parts[0].dtype)], self._next)
            flat, batch.parts = _room(*parts, self.hops[number + 1].num_received)
            post.receive([flat], self._before)
        batch.work = post.go()
        return batch

    def _post(
        self, k: Tensor, v: Tensor, number: int, grads: Pair | None = None, *, back: bool = False
    ) -> _HopMessages:
        """Start hop `number` and, with `back`, return the gradients of hop `number - 2`.

        When hop `number` starts, hop `number - 1` has arrived but is not computed, so the newest
        gradients are those of `number - 2`. Both sides post gradients before keys and values,
        because messages between two ranks match in the order in which they are posted.
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
            target, source, sent = hop.target, hop.source, hop.sent
            if self._passes_on:  # k and v are the part that came last
                target, source, sent = self._next, self._before, (slice(None),)
            if sent:
                post.send([_packed((k, v), sent, k.dtype)], target)
            flat, batch.parts = _room(k, v, hop.num_received)
            post.receive([flat], source)
        batch.work = post.go()
        return batch


class GatheredKeys:
    """An exchange by one all-gather of keys and one of values.

    parts: the ranges of every rank of the group.
    """

    def __init__(self, group: Group, parts: tuple[Ranges, ...], visibility: Visibility):
        self._group = ref(group)  # weak, as in Ring
        index = group.rank()
        positions = [tiled(ranges, visibility) for ranges in parts]
        self._sizes = tuple(length(ranges) for ranges in parts)
        self._own = tasks_of(positions[index], positions[index], visibility)
        ranges_before, ranges_after = (
            tuple(each for ranges in group_positions for each in ranges)
            for group_positions in (positions[:index], positions[index + 1 :])
        )
        start, stop = sum(self._sizes[:index]), sum(self._sizes[: index + 1])
        self._others = (
            (slice(0, start), tasks_of(positions[index], ranges_before, visibility)),
            (slice(stop, sum(self._sizes)), tasks_of(positions[index], ranges_after, visibility)),
        )

    def run_forward(self, k: Tensor, v: Tensor, forward: Forward) -> None:
        works = self._begin(k), self._begin(v)
        # computed between start and wait: both all-gathers travel meanwhile
        forward(self._own, k, v)
        all_k, all_v = (work.wait().movedim(0, 2) for work in works)
        for span, tasks in self._others:
            if tasks:
                forward(tasks, all_k[:, :, span], all_v[:, :, span])

    def run_backward(self, k: Tensor, v: Tensor, backward: Backward) -> Pair:
        works = self._begin(k), self._begin(v)
        own_grads = backward(self._own, k, v)
        # after the own part, which was computed while the keys travelled
        gathered = [work.wait().movedim(0, 2) for work in works]
        grads_before, grads_after = (
            backward(tasks, *(keys_or_values[:, :, span] for keys_or_values in gathered))
            for span, tasks in self._others
        )
        return tuple(  # type: ignore[return-value]
            primitives.reduce_scatter(
                torch.cat(parts, 2).movedim(2, 0).contiguous(), self._group(), self._sizes
            ).movedim(0, 2)
            for parts in zip(grads_before, own_grads, grads_after, strict=True)
        )

    def _begin(self, x: Tensor) -> Work:
        """Start the all-gather (B, h, S_local, D) -> (S, B, h, D) along the sequence."""
        rows = x.movedim(2, 0).contiguous()
        return primitives.all_gather(rows, self._group(), self._sizes, async_op=True)


def _packed(pair: Pair, sent: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
    """Copy the `sent` slices of both tensors into one message.

    It is one message because each message wakes a gloo thread on both sides.
    """
    parts = [[x[:, :, span] for span in sent] for x in pair]
    flat, buffers = _room(*pair, sum(part.shape[2] for part in parts[0]), dtype)
    for buffer, slices in zip(buffers, parts, strict=True):
        start = 0
        for part in slices:
            buffer[:, :, start : start + part.shape[2]] = part
            start += part.shape[2]
    return flat


def _room(k: Tensor, v: Tensor, num: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Pair]:
    """Allocate one flat tensor for `num` positions of keys and values, with a view for each."""
    shapes = [(*x.shape[:2], num, x.shape[3]) for x in (k, v)]
    sizes = [math.prod(shape) for shape in shapes]
    flat = k.new_empty(sum(sizes), dtype=dtype)
    flat_k, flat_v = flat.split(sizes)
    return flat, (flat_k.view(shapes[0]), flat_v.view(shapes[1]))
