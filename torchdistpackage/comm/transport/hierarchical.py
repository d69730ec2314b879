"""All-reduce over nodes of several ranks each, on gloo: an element crosses between nodes once.

What crosses between nodes is carried by all ranks of a node, a part each. So a tensor is cut into
chunks, and of each the ranks of a node sum up a part each, sum it over the nodes, and hand it to
each other. Chunks follow one another: while one crosses, others are summed and handed out. (The
2D-torus all-reduce of arXiv:1811.05233.)

A step begins when the one before has ended, so a sum goes on under a backward: gloo's threads wake
one of ours, which takes the next step. (On its own threads a group cannot end, so they keep none.)
Between nodes collectives meet in the order in which they are issued, so a chunk does not cross
before all that were begun earlier.
"""

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.dtypes import added, to_reducible
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.primitives import SUM, Group, ranks_of, start_all_reduce
from torchdistpackage.comm.transport.pairwise import post_receives, post_sends
from torchdistpackage.comm.work import NO_FACTS, Work, run_async, wait_works
from torchdistpackage.errors import CommError

Start = Callable[[Tensor, Group, dist.ReduceOp.RedOpType], Work]
"""Begins to reduce a tensor in place, as `primitives.start_all_reduce` does."""

CHUNK_BYTES = 2 * 2**20
"""Shorter chunks cost more calls; longer ones leave the link idle while the first is summed and the
last handed out."""
GRACE_S = 1.0
"""Beyond the limit, for the back end's own error, which says more than that nothing came."""


def hierarchical_all_reduce(
    group: Group, nodes: Sequence[Hashable] | None = None, *, chunk_bytes: int = CHUNK_BYTES
) -> Start | None:
    """`start_all_reduce` by way of the nodes of `group`; None where a flat one is as good.

    nodes: the node of each rank of the group, in its order; None asks all for their host names.
    chunk_bytes: of a chunk; what is no longer than half of one goes flat, in one step, not three.
    It is as good unless gloo carries the group and its ranks fill two or more nodes with two or
    more each, alike. All ranks of the group call this, with the same nodes, and keep what comes
    back for the life of the group: it has groups of its own.

    Raises:
        CommError: `nodes` does not name one for each rank.
    """
    if group.size() == 1 or not state_of(group).direct:
        return None
    if nodes is None:
        nodes = primitives.gather_objects(socket.gethostname(), group)  # type: ignore[assignment]
    assert nodes is not None
    ranks = ranks_of(group)
    if len(nodes) != len(ranks):
        raise CommError(f"nodes has {len(nodes)} names for the {len(ranks)} ranks {ranks}")
    members: dict[Hashable, list[int]] = {}
    for rank, node in zip(ranks, nodes, strict=True):
        members.setdefault(node, []).append(rank)
    inside = members[nodes[group.rank()]]
    if len(members) == 1 or len(inside) == 1 or len({len(m) for m in members.values()}) > 1:
        return None
    place = inside.index(ranks[group.rank()])
    return _HierarchicalAllReduce(group, inside, [m[place] for m in members.values()], chunk_bytes)


class _HierarchicalAllReduce:
    """The groups of one rank, and its chunks in the order in which they cross between nodes."""

    def __init__(
        self, group: Group, inside: Sequence[int], across: Sequence[int], chunk_bytes: int
    ):
        self._group, self._chunk_bytes = group, chunk_bytes
        self._options = group._get_backend(torch.device("cpu")).options
        self._limit: timedelta = self._options._timeout
        groups = Groups(dist.get_rank(), self._limit.total_seconds())
        use = f"all_reduce of {ranks_of(group)}"
        self._inside, self._across = groups.of(inside, use=use), groups.of(across, use=use)
        self._waiting: deque[_Chunk] = deque()
        self._num_chunks = 0
        self.num_steps = 0
        self._ended: _Ended = SimpleQueue()
        thread = threading.Thread(
            target=_serve, args=(ref(self), self._ended), name="all_reduce by node", daemon=True
        )
        thread.start()
        finalize(self, self._ended.put, None)

    def __call__(self, flat: Tensor, group: Group, op: dist.ReduceOp.RedOpType = SUM) -> Work:
        """`start_all_reduce`; only large sums take the way over the nodes."""
        if group is not self._group:
            raise CommError(
                f"this all-reduce is of ranks {ranks_of(self._group)}, not of {ranks_of(group)}; "
                f"ask hierarchical_all_reduce for one of each group"
            )
        if op != SUM or flat.is_cuda or 2 * flat.nbytes <= self._chunk_bytes:
            return start_all_reduce(flat, group, op)
        wire, finish = to_reducible(flat, op)
        facts = (str(op),) if recorder.checks else NO_FACTS
        return run_async("all_reduce", group, flat, facts, finish, self._begin, wire.view(-1))

    def _begin(self, flat: Tensor, *, group: Group, async_op: bool) -> "_ChunkedWork":
        self._follow_limit()
        inside = self._inside
        chunks = [_Chunk(x, inside) for x in flat.split(self._chunk_bytes // flat.itemsize)]
        self._waiting += chunks
        for chunk in chunks:
            self._num_chunks += 1
            chunk.tag = self._num_chunks % 2**30
            chunk.works = post_receives(chunk.parts, inside, chunk.tag)
            received = [len(chunk.mine)] * inside.size()
            given = [len(part) for part in chunk.parts]
            exchanged = dist.all_to_all_single(
                chunk.buffer, chunk.x, received, given, group=inside, async_op=True
            )
            self._tell(_HierarchicalAllReduce.exchanged, chunk, exchanged)
        return _ChunkedWork(self, chunks, self._limit)

    def _follow_limit(self) -> None:
        """The time limit of the group is that of its parts."""
        limit = self._options._timeout
        if limit != self._limit:
            self._limit = limit
            for group in (self._inside, self._across):
                primitives.set_timeout(group, limit.total_seconds())

    def _tell(self, then: "_Step", chunk: "_Chunk", work: dist.Work) -> None:
        """When `work` has ended our thread takes the step `then`."""
        ended = self._ended
        work.get_future().then(lambda future: ended.put((then, chunk, future)))

    # -- on our thread -------------------------------------------------------------------

    def exchanged(self, chunk: "_Chunk", future: torch.futures.Future) -> None:
        """The sums of my node for my part of a chunk are here."""
        try:
            future.value()
            chunk.add()
            while self._waiting and self._waiting[0].added:
                self._cross(self._waiting[0])
                self._waiting.popleft()
        except Exception as error:  # whatever it is, someone waits for it
            while self._waiting:  # another order than that of the others would mix up chunks
                self._waiting.popleft().sent.set_exception(error)

    def _cross(self, chunk: "_Chunk") -> None:
        if len(chunk.mine):
            work = dist.all_reduce(chunk.mine, group=self._across, async_op=True)
            self._tell(_HierarchicalAllReduce.crossed, chunk, work)
        else:
            chunk.hand_out(self._inside)

    def crossed(self, chunk: "_Chunk", future: torch.futures.Future) -> None:
        """My part of a chunk is the sum over all ranks."""
        try:
            future.value()
            chunk.hand_out(self._inside)
        except Exception as error:
            chunk.sent.set_exception(error)


class _Chunk:
    """A piece of a tensor, of which each rank of the node carries a part between nodes.

    buffer: my part as each of them has it. works: messages with the sums. sent: mine are posted.
    """

    __slots__ = ("added", "buffer", "mine", "parts", "sent", "tag", "works", "x")

    def __init__(self, x: Tensor, inside: Group):
        self.x, self.parts = x, list(x.tensor_split(inside.size()))
        self.mine = self.parts[inside.rank()]
        self.buffer = x.new_empty(len(self.mine) * inside.size())
        self.works: list[dist.Work] = []
        self.tag, self.added, self.sent = 0, False, Future[None]()

    @torch.no_grad()
    def add(self) -> None:
        if len(self.mine):
            self.mine.copy_(added(self.buffer.split(len(self.mine))))
        self.added = True

    def hand_out(self, inside: Group) -> None:
        self.works += post_sends([self.mine] * len(self.parts), inside, self.tag)
        self.sent.set_result(None)


class _ChunkedWork:
    """All of one call; waited for like the works of a back end.

    owner: must not end before its chunks have.
    """

    def __init__(self, owner: _HierarchicalAllReduce, chunks: Sequence[_Chunk], limit: timedelta):
        self._owner, self._chunks, self._limit = owner, chunks, limit

    def wait(self, limit: timedelta | None = None) -> None:
        limit = limit or self._limit
        for chunk in self._chunks:
            self._await_sent(chunk, limit)
            wait_works(chunk.works, limit)

    def _await_sent(self, chunk: _Chunk, limit: timedelta) -> None:
        """Chunks begun earlier come first, each in its own time: the limit is for any step at all.

        Raises:
            RuntimeError: what went wrong on our thread, or nothing went on for `limit`.
        """
        limit_s, num_steps = limit.total_seconds() + GRACE_S, -1
        while num_steps != self._owner.num_steps:
            num_steps = self._owner.num_steps
            with contextlib.suppress(TimeoutError):
                error = chunk.sent.exception(limit_s)
                if error is None or isinstance(error, RuntimeError):
                    return chunk.sent.result()
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise RuntimeError(f"no chunk went on for {limit_s:g} s, and the back end raised no error")


_Step = Callable[[_HierarchicalAllReduce, _Chunk, torch.futures.Future], None]
_Ended = SimpleQueue[tuple[_Step, _Chunk, torch.futures.Future] | None]
"""Steps whose work has ended; None: no more will come."""


def _serve(owner: ref[_HierarchicalAllReduce], ended: _Ended) -> None:
    while (ending := ended.get()) is not None:
        step, chunk, future = ending
        if (alive := owner()) is not None:
            alive.num_steps += 1
            step(alive, chunk, future)
        del ending, chunk, future, alive  # nothing is kept alive while there is nothing to do
