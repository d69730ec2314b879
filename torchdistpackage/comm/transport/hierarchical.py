"""All-reduce over nodes of several ranks each, on gloo: each element crosses between nodes once.

All ranks of a node share the traffic between nodes. The tensor is cut into chunks. For each chunk,
every rank of a node reduces one slice over the node, all-reduces it over the nodes, and sends it to
the other ranks of the node. Chunks overlap: while one crosses, others are reduced and distributed.
(The 2D-torus all-reduce of arXiv:1811.05233.)

A step begins when the one before has ended, so a sum proceeds during a backward pass: gloo's
threads wake one of ours, which takes the next step. (A group cannot end on its own threads, so they
hold no reference to one.) Collectives between nodes pair up in the order of their issue, so a chunk
does not cross before all that began earlier.
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
"""Size of a chunk. Shorter chunks cost more calls; longer ones leave the link idle while the first
is summed and the last is distributed."""
GRACE_S = 1.0
"""Seconds beyond the limit that are left for the back end's own error, which is more informative
than a timeout."""


def hierarchical_all_reduce(
    group: Group, nodes: Sequence[Hashable] | None = None, *, chunk_bytes: int = CHUNK_BYTES
) -> Start | None:
    """Return a `start_all_reduce` that goes by way of the nodes of `group`, or None if a flat one
    is as good.

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
        raise CommError(
            f"nodes has {len(nodes)} names for the {len(ranks)} ranks {ranks}; give one for each "
            "rank"
        )
    by_node: dict[Hashable, list[int]] = {}
    for rank, node in zip(ranks, nodes, strict=True):
        by_node.setdefault(node, []).append(rank)
    on_node = by_node[nodes[group.rank()]]
    if (
        len(by_node) == 1
        or len(on_node) == 1
        or len({len(node_ranks) for node_ranks in by_node.values()}) > 1
    ):
        return None
    index = on_node.index(ranks[group.rank()])
    return _HierarchicalAllReduce(
        group, on_node, [node_ranks[index] for node_ranks in by_node.values()], chunk_bytes
    )


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
        """Start the all-reduce; only large sums travel by way of the nodes."""
        if group is not self._group:
            raise CommError(
                f"this all-reduce was made for ranks {ranks_of(self._group)}, not for "
                f"{ranks_of(group)}; make another one for that group with hierarchical_all_reduce"
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
            received_lengths = [len(chunk.mine)] * inside.size()
            sent_lengths = [len(part) for part in chunk.parts]
            exchanged = dist.all_to_all_single(
                chunk.buffer, chunk.x, received_lengths, sent_lengths, group=inside, async_op=True
            )
            self._tell(_HierarchicalAllReduce.exchanged, chunk, exchanged)
        return _ChunkedWork(self, chunks, self._limit)

    def _follow_limit(self) -> None:
        """Apply the group's time limit to its subgroups."""
        limit = self._options._timeout
        if limit != self._limit:
            self._limit = limit
            for group in (self._inside, self._across):
                primitives.set_timeout(group, limit.total_seconds())

    def _tell(self, then: "_Step", chunk: "_Chunk", work: dist.Work) -> None:
        """Make our thread take the step `then` when `work` has ended."""
        ended = self._ended
        work.get_future().then(lambda future: ended.put((then, chunk, future)))

    # -- on our thread -------------------------------------------------------------------

    def exchanged(self, chunk: "_Chunk", future: torch.futures.Future) -> None:
        """Add the arrived values of the node's ranks for this rank's slice of a chunk."""
        try:
            future.value()
            chunk.add()
            while self._waiting and self._waiting[0].added:
                self._cross(self._waiting[0])
                self._waiting.popleft()
        except Exception as error:  # a caller waits for this chunk, so pass on any error
            # later chunks must not cross: their order would differ from the other nodes'
            while self._waiting:
                self._waiting.popleft().sent.set_exception(error)

    def _cross(self, chunk: "_Chunk") -> None:
        """Begin the all-reduce of this rank's slice over the nodes, or skip it if the slice is
        empty.
        """
        if len(chunk.mine):
            work = dist.all_reduce(chunk.mine, group=self._across, async_op=True)
            self._tell(_HierarchicalAllReduce.crossed, chunk, work)
        else:
            chunk.hand_out(self._inside)

    def crossed(self, chunk: "_Chunk", future: torch.futures.Future) -> None:
        """Distribute this rank's slice of a chunk, which now holds the sum over all ranks."""
        try:
            future.value()
            chunk.hand_out(self._inside)
        except Exception as error:  # a caller waits for this chunk, so pass on any error
            chunk.sent.set_exception(error)


class _Chunk:
    """A chunk of a tensor; each rank of the node reduces one slice of it between nodes.

    buffer: this rank's slice from each rank of the node. works: messages with the sums. sent: this
    rank has posted its own.
    """

    __slots__ = ("added", "buffer", "mine", "parts", "sent", "tag", "works", "x")

    def __init__(self, x: Tensor, group: Group):
        self.x = x
        self.parts = list(x.tensor_split(group.size()))
        self.mine = self.parts[group.rank()]
        self.buffer = x.new_empty(len(self.mine) * group.size())
        self.works: list[dist.Work] = []
        self.tag = 0
        self.added = False
        self.sent = Future[None]()

    @torch.no_grad()
    def add(self) -> None:
        """Add the slices that arrived from this node's ranks; the chunk may cross now."""
        if len(self.mine):
            self.mine.copy_(added(self.buffer.split(len(self.mine))))
        self.added = True

    def hand_out(self, inside: Group) -> None:
        """Send this rank's slice to the other ranks of the node."""
        self.works += post_sends([self.mine] * len(self.parts), inside, self.tag)
        self.sent.set_result(None)


class _ChunkedWork:
    """The work of one call, which a caller awaits like a back end's work.

    owner: must not end before its chunks have.
    """

    def __init__(self, owner: _HierarchicalAllReduce, chunks: Sequence[_Chunk], limit: timedelta):
        self._owner, self._chunks, self._limit = owner, chunks, limit

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait until all chunks have arrived; any single step may take `limit`."""
        limit = limit or self._limit
        for chunk in self._chunks:
            self._await_sent(chunk, limit)
            wait_works(chunk.works, limit)

    def _await_sent(self, chunk: _Chunk, limit: timedelta) -> None:
        """Wait until this rank's slice of `chunk` is being sent to the node's other ranks.

        Chunks begun earlier go first, each with its own time limit. So the limit applies to any
        step of this rank.

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
        raise RuntimeError(f"no chunk arrived for {limit_s:g} s, and the back end raised no error")


_Step = Callable[[_HierarchicalAllReduce, _Chunk, torch.futures.Future], None]
_Ended = SimpleQueue[tuple[_Step, _Chunk, torch.futures.Future] | None]
"""Steps whose work has ended; None: no more will come."""


def _serve(owner: ref[_HierarchicalAllReduce], ended: _Ended) -> None:
    """Run the next steps of ended works until None arrives.

    Only a weak reference to the owner is held, so that a group may end while nothing is in
    progress.
    """
    while (ending := ended.get()) is not None:
        step, chunk, future = ending
        if (alive := owner()) is not None:
            alive.num_steps += 1
            step(alive, chunk, future)
        del ending, chunk, future, alive  # nothing is kept alive while there is nothing to do
