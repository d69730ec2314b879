"""A process group that delivers late: torch.distributed's calls as a device's queue runs them.

One rule: an asynchronous call is delivered when it is waited for, after all earlier ones of its
group, and not before; until then what it writes is poison and what it reads must stay. A
synchronous one delivers all before it, as both would run in order.
"""

import sys
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.backends import Transport, register_transport
from torchdistpackage.comm.gloo_threads import deprioritize
from torchdistpackage.errors import RaceError
from torchdistpackage.harness.late.call import LateCall, LateWork, issued_at, own_operations
from torchdistpackage.harness.late.guard import Guard
from torchdistpackage.harness.late.orders import LATE
from torchdistpackage.harness.late.transfer import Mirror, Peers, Posted, Transfer
from torchdistpackage.harness.late.world import world
from torchdistpackage.harness.lint.data_movement import combined, copy, even_parts, op_name
from torchdistpackage.harness.lint.own_backend import OwnGroup

Tensors = Sequence[Tensor]


class LateGroup(OwnGroup):
    """One member's end of a group."""

    def __init__(self, road: Peers | Mirror, rank: int, ranks: tuple[int, ...], name: str):
        super().__init__(rank, len(ranks), name, LATE)
        self.calls: deque[LateCall] = deque()
        self._transport, self._ranks = road, ranks
        self._num_issued = 0
        self._batch: list[tuple[Posted, int]] = []
        self._tags: dict[tuple[str, int], tuple[int, LateCall]] = {}

    # -- collectives, by the names that torch.distributed calls --------------------------

    def allreduce(self, tensors: list[Tensor], opts=None) -> LateWork:
        n = self.size()
        return self._issue("all_reduce", opts, [tensors] * n, [tensors] * n, tensors, op=_op(opts))

    def reduce(self, tensors: list[Tensor], opts) -> LateWork:
        n, mine = self.size(), self.rank() == opts.rootRank
        likes = [tensors if mine else []] * n
        writes = tensors if mine else []
        return self._issue(
            "reduce", opts, self._to(opts.rootRank, tensors), likes, writes, op=_op(opts)
        )

    def broadcast(self, tensors: list[Tensor], opts) -> LateWork:
        n, mine = self.size(), self.rank() == opts.rootRank
        sends = [tensors if mine else []] * n
        writes = [] if mine else tensors
        return self._issue("broadcast", opts, sends, self._to(opts.rootRank, writes), writes)

    def allgather(self, outputs, inputs: list[Tensor], opts=None) -> LateWork:
        parts = [[room[i] for room in outputs] for i in range(self.size())]
        return self._issue("all_gather", opts, [inputs] * self.size(), parts, _all(parts))

    def all_gather_single_coalesced(self, outputs, inputs, opts=None) -> LateWork:
        pairs = zip(outputs, inputs, strict=True)
        rooms = [even_parts(out, x.numel(), self.size()) for out, x in pairs]
        return self.allgather(rooms, inputs, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs, opts=None) -> LateWork:
        n = self.size()
        sends = [[parts[i] for parts in inputs] for i in range(n)]
        return self._issue("reduce_scatter", opts, sends, [outputs] * n, outputs, op=_op(opts))

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None) -> LateWork:
        pairs = zip(outputs, inputs, strict=True)
        parts = [even_parts(x, out.numel(), self.size()) for out, x in pairs]
        return self.reduce_scatter(outputs, parts, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts=None) -> LateWork:
        rooms = [[x] for x in outputs]
        return self._issue("all_to_all", opts, [[x] for x in inputs], rooms, outputs)

    def gather(self, outputs, inputs: list[Tensor], opts) -> LateWork:
        rooms = [[x] for x in outputs[0]] if outputs else [[]] * self.size()
        sends = self._to(opts.rootRank, inputs)
        return self._issue("gather", opts, sends, rooms, _all(rooms))

    def scatter(self, outputs: list[Tensor], inputs, opts) -> LateWork:
        sends = [[x] for x in inputs[0]] if inputs else [[]] * self.size()
        rooms = self._to(opts.rootRank, outputs)
        return self._issue("scatter", opts, sends, rooms, outputs)

    def barrier(self, opts=None) -> LateWork:
        token = [torch.zeros(1, dtype=torch.uint8)]
        n = self.size()
        return self._issue("barrier", opts, [token] * n, [token] * n, token, op="max")

    # -- messages ----------------------------------------------------------------------

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> LateWork | None:
        return self._post(("send", tensors[0], target), tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> LateWork | None:
        return self._post(("receive", tensors[0], source), tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> LateWork:
        raise RuntimeError("a receive from any source is not there on NCCL; name the source")

    # -- what torch asks of a group ----------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device):
        if (
            self._transport.gloo is None
        ):  # of one rank, or mirrored: torch wants one to set limits on
            self._transport.gloo = dist.ProcessGroupGloo(
                dist.HashStore(), 0, 1, timedelta(minutes=1)
            )
        return self._transport.gloo

    def shutdown(self) -> None:
        """What is still in flight shows when the job ends."""
        world.forget(self)

    # -- from issue to delivery ----------------------------------------------------------

    def deliver_next(self) -> None:
        """Deliver the first call that is not."""
        self.calls.popleft().deliver()

    def _issue(self, operation: str, opts, sends, likes, writes: Tensors, op: str = "") -> LateWork:
        """Begin a collective: sends[i] go to rank i, what comes from it looks like likes[i].

        It ends up in `writes`: as it came, or combined by `op`.
        """

        def finish(transfer: Transfer, writes: Tensors) -> None:
            if op:
                for x, *same in zip(writes, *transfer.rooms, strict=True):
                    _write(combined(same, op), x)
            else:
                for room, x in zip(_all(transfer.rooms), writes, strict=True):
                    _write(room, x)

        return self._go(
            operation,
            bool(getattr(opts, "asyncOp", False)),
            lambda: self._transport.begin(sends, likes),
            _all(sends),
            writes,
            finish,
        )

    def _post(self, message: Posted, tag: int) -> LateWork | None:
        """Begin a message; those of a torch batch go together, with the last one's work for all."""
        self._batch.append((message, tag))
        if len(self._batch) < _num_in_batch():
            return None
        posted, self._batch = self._batch, []
        messages = [message for message, _ in posted]
        sent = [x for what, x, _ in messages if what == "send"]
        received = [x for what, x, _ in messages if what == "receive"]
        is_received = [what == "receive" for what, _, _ in messages]

        def finish(transfer: Transfer, writes: Tensors) -> None:
            for (room,), x in zip(compress(transfer.rooms, is_received), writes, strict=True):
                _write(room, x)

        what = " and ".join(f"{what} {self._ranks[peer]}" for what, _, peer in messages)
        work = self._go(what, True, lambda: self._transport.post(messages), sent, received, finish)
        for (what, _, peer), tag in posted:
            before, of = self._tags.get((what, peer), (tag, work.call))
            if before != tag and not of.done:
                raise RaceError(
                    f"{of.name}: tags {before} and {tag} tell messages of one way apart, "
                    f"but NCCL ignores tags: they meet in the order of their issue{issued_at()}"
                )
            self._tags[what, peer] = tag, work.call
        return work

    def _go(
        self,
        operation: str,
        is_async: bool,
        begin: Callable[[], Transfer],
        reads: Tensors,
        writes: Tensors,
        finish: Callable[[Transfer, list[Tensor]], None],
    ) -> LateWork:
        with own_operations():
            return self._queue(operation, is_async, begin, reads, writes, finish)

    def _queue(self, operation: str, is_async: bool, begin, reads, writes, finish) -> LateWork:
        self._num_issued += 1
        name = f"{operation} (number {self._num_issued}) over ranks {self._ranks}"
        if world.strict is not None:
            world.strict.check(name, operation, [*reads, *writes])
        written = {id(x) for x in writes}
        read = {id(x): x for x in reads if id(x) not in written}
        guards = [Guard(x, False) for x in read.values()] + [Guard(x, True) for x in writes]
        world.claim(self, name, guards)
        if not is_async:
            while self.calls:
                self.deliver_next()
            transfer = begin()
            transfer.wait()
            finish(transfer, list(writes))
            world.observer.called(self, name, list(read.values()), writes, None)
            world.draw()
            return LateWork(None, lambda: None, list(writes))
        call = LateCall(name, guards, begin(), finish)
        work = LateWork(call, lambda: self._settle(call), list(writes))
        self.calls.append(call)
        world.issued(self, call)
        world.observer.called(self, name, list(read.values()), writes, call)
        world.draw()
        return work

    def _settle(self, call: LateCall) -> None:
        world.draw()
        while not call.done:
            self.deliver_next()
        world.observer.waited(call)

    def _to(self, root: int, tensors: Tensors) -> list[Tensors]:
        """To or from the root alone."""
        return [tensors if i == root else [] for i in range(self.size())]


def _num_in_batch() -> int:
    """How many messages torch's batch that is being posted has; 1 outside of one."""
    frame = sys._getframe(3)
    for _ in range(4):
        if frame is None:
            break
        if frame.f_code.co_name == "batch_isend_irecv":
            return len(frame.f_locals["p2p_op_list"])
        frame = frame.f_back
    return 1


def _write(value: Tensor, x: Tensor) -> None:
    copy(value, x.data)


def _all(parts: Sequence[Tensors]) -> list[Tensor]:
    return [x for tensors in parts for x in tensors]


def _op(opts) -> str:
    return op_name(dist.ReduceOp.SUM if opts is None else opts.reduceOp)


def _create(options, _) -> LateGroup:
    rank, size = options.group_rank, options.group_size
    ranks = tuple(options.global_ranks_in_group or range(size))
    road = Mirror(rank, size) if _mirrored else Peers(options.store, rank, size, options.timeout)
    deprioritize()
    return LateGroup(road, rank, ranks, options.group_id)


_mirrored: list[object] = []
"""Not empty while this process stands for a whole world."""


def register() -> None:
    """Make `late` a back end of torch.distributed in this process."""
    if LATE.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(LATE, _create, extended_api=True, devices=["cpu"])
        register_transport(Transport(LATE, queued=True, averages=True))
