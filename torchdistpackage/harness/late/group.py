"""A process group that delivers late: it runs torch.distributed's calls like a device's queue.

An asynchronous call is delivered when it is waited for, after all earlier ones of its group, and
not before; until then what it writes is poison and what it reads must stay. A synchronous one
delivers all before it, as both would run in order.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.attendance import without_peers
from torchdistpackage.comm.backends import Transport, deprioritize, register_transport
from torchdistpackage.comm.runtime import leave
from torchdistpackage.errors import RaceError
from torchdistpackage.harness.late.call import (
    Guard,
    LateCall,
    LateWork,
    Mirror,
    Peers,
    Posted,
    Transfer,
    issued_at,
    own_operations,
)
from torchdistpackage.harness.late.orders import LATE
from torchdistpackage.harness.late.strict import strictness
from torchdistpackage.harness.late.world import world
from torchdistpackage.thread_ranks.own_backend import (
    Collective,
    OwnGroup,
    Tensors,
    combined,
    copy,
    flat,
)


class LateGroup(OwnGroup):
    """One member's end of a group."""

    def __init__(self, transport: Peers | Mirror, rank: int, ranks: tuple[int, ...], name: str):
        super().__init__(rank, len(ranks), name, LATE)
        self.calls: deque[LateCall] = deque()
        self._transport, self._ranks = transport, ranks
        self._num_issued = 0
        self._batch: list[tuple[Posted, int]] = []
        self._tags: dict[tuple[str, int], tuple[int, LateCall]] = {}

    # -- messages ----------------------------------------------------------------------

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> LateWork | None:
        return self._post(("send", tensors[0], target), tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> LateWork | None:
        return self._post(("receive", tensors[0], source), tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> LateWork:
        raise RuntimeError("NCCL cannot receive from any source; name the source")

    # -- what torch asks of a group ----------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device):
        if self._transport.gloo is None:  # mirrored, or of one rank: torch sets limits on it
            store, limit = dist.HashStore(), timedelta(minutes=1)
            self._transport.gloo = dist.ProcessGroupGloo(store, 0, 1, limit)
        return self._transport.gloo

    def shutdown(self) -> None:
        """Forget this group; calls still in flight are reported when the job ends."""
        world.forget(self)

    # -- from issue to delivery ----------------------------------------------------------

    def deliver_next(self) -> None:
        """Deliver the first call that has not been delivered."""
        self.calls.popleft().deliver()

    def collective(self, call: Collective, is_async: bool) -> LateWork:
        op = call.op  # a call that is done keeps no tensor alive

        def finish(transfer: Transfer, writes: Tensors) -> None:
            if op:
                for x, *same in zip(writes, *transfer.rooms, strict=True):
                    copy(combined(same, op), x.data)
            else:
                for room, x in zip(flat(transfer.rooms), writes, strict=True):
                    copy(room, x.data)

        return self._go(
            call.operation,
            is_async,
            lambda: self._transport.begin(call.sends, call.rooms),
            flat(call.sends),
            call.writes,
            finish,
        )

    def _post(self, message: Posted, tag: int) -> LateWork | None:
        """Begin a message; those of a torch batch go together, with the last one's work for all."""
        self._batch.append((message, tag))
        if len(self._batch) < _num_in_batch():
            return None
        posted, self._batch = self._batch, []
        messages = [message for message, _ in posted]
        sent = [x for kind, x, _ in messages if kind == "send"]
        received = [x for kind, x, _ in messages if kind == "receive"]
        is_received = [kind == "receive" for kind, _, _ in messages]

        def finish(transfer: Transfer, writes: Tensors) -> None:
            for (room,), x in zip(compress(transfer.rooms, is_received), writes, strict=True):
                copy(room, x.data)

        kind = " and ".join(f"{kind} {self._ranks[peer]}" for kind, _, peer in messages)
        work = self._go(kind, True, lambda: self._transport.post(messages), sent, received, finish)
        for (kind, _, peer), tag in posted:
            previous_tag, of = self._tags.get((kind, peer), (tag, work.call))
            if previous_tag != tag and not of.done:
                raise RaceError(
                    f"{of.name}: tags {previous_tag} and {tag} distinguish messages from one rank, "
                    f"but NCCL ignores tags: they meet in the order of their issue{issued_at()}"
                )
            self._tags[kind, peer] = tag, work.call
        return work

    def _go(self, *call) -> LateWork:
        with own_operations():
            return self._queue(*call)

    def _queue(
        self,
        operation: str,
        is_async: bool,
        begin: Callable[[], Transfer],
        reads: Tensors,
        writes: Tensors,
        finish: Callable[[Transfer, Tensors], None],
    ) -> LateWork:
        self._num_issued += 1
        name = f"{operation} (number {self._num_issued}) over ranks {self._ranks}"
        if world.check is not None:
            world.check(name, operation, [*reads, *writes])
        written = {id(x) for x in writes}
        read_only = {id(x): x for x in reads if id(x) not in written}
        guards = [Guard(x, False) for x in read_only.values()] + [Guard(x, True) for x in writes]
        world.claim(self, name, guards)
        if not is_async:
            while self.calls:
                self.deliver_next()
            transfer = begin()
            # a call that blocks leaves nothing in flight
            transfer.wait()
            finish(transfer, list(writes))
            world.observer.called(self, name, list(read_only.values()), writes, None)
            world.draw()
            return LateWork(None, lambda: None, writes)
        call = LateCall(name, guards, begin(), finish)
        work = LateWork(call, lambda: self._settle(call), writes)
        self.calls.append(call)
        world.issued(self, call)
        world.observer.called(self, name, list(read_only.values()), writes, call)
        world.draw()
        return work

    def _settle(self, call: LateCall) -> None:
        world.draw()
        while not call.done:
            self.deliver_next()
        world.observer.waited(call)


def _num_in_batch() -> int:
    """Return how many messages torch's batch that is being posted has; 1 outside of one."""
    frame = sys._getframe(3)
    for _ in range(4):
        if frame is None:
            break
        if frame.f_code.co_name == "batch_isend_irecv":
            return len(frame.f_locals["p2p_op_list"])
        frame = frame.f_back
    return 1


def _create(options, _) -> LateGroup:
    rank, size = options.group_rank, options.group_size
    ranks = tuple(options.global_ranks_in_group or range(size))
    peers = Mirror(rank, size) if _mirrored else Peers(options.store, rank, size, options.timeout)
    deprioritize()
    return LateGroup(peers, rank, ranks, options.group_id)


_mirrored: list[object] = []
"""Worlds for which this process stands alone; empty outside of `mirror`."""


def register() -> None:
    """Make `late` a back end of torch.distributed in this process."""
    if LATE.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(LATE, _create, extended_api=True, devices=["cpu"])
        register_transport(Transport(LATE, queued=True, averages=True))
        # From 2.15 on torch hangs its flight recorder on every group whose back end has no record
        # of its own, and asks the group for a name that only groups with back ends of C++ have.
        getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add(LATE)


@contextmanager
def mirror(world_size: int, rank: int = 0, transport: str = LATE) -> Iterator[None]:
    """Make this process rank `rank` of `world_size` inside the block, under the late transport and
    without peers.

    Every other rank is taken to hold what this one holds: a sum is the value times the ranks of the
    group, a gather copies of it, and a message received is the one that was sent. Milliseconds.
    transport: an order of completion (orders.py).

    Raises:
        RaceError: a call was not waited for.
    """
    register()
    _mirrored.append(rank)
    try:
        dist.init_process_group(LATE, store=dist.HashStore(), rank=rank, world_size=world_size)
        with world.job(transport, rank), strictness(transport), without_peers():
            yield
    except BaseException as error:
        error.add_note(f"transport: {transport}")
        raise
    finally:
        leave()
        _mirrored.pop()
