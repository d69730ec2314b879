"""A back end whose ranks are threads: torch.distributed's calls, taken to the board.

This file translates and moves nothing along. When a call is done the board decides
(matcher.py), what it puts where stands in data_movement.py, and who runs when in threads.py.

A group is made as NCCL makes it, its members waiting for each other. In a world that is bound to a
device torch has all ranks of the world take part, each with the list of its own group
(`ThreadGroup.split`), and nothing but the lint compares those lists.
"""

import threading
from collections.abc import Hashable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.backends import Transport, register_transport
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.comm.tensor_meta import TAG
from torchdistpackage.errors import CommError
from torchdistpackage.harness.lint import data_movement
from torchdistpackage.harness.lint.data_movement import Payload, even_parts, op_name
from torchdistpackage.harness.lint.handles import LintContext, ThreadWork
from torchdistpackage.harness.lint.matcher import (
    CREATION,
    SPLIT,
    Facts,
    LintGroup,
    OpSignature,
    P2POp,
    PendingOp,
    Where,
)
from torchdistpackage.harness.lint.own_backend import OwnGroup
from torchdistpackage.harness.lint.stacks import stack_here

BACKEND = "threads"
"""What ranks of a lint talk over; it stands for NCCL where calls are queued."""
HOST_BACKEND = "threads_host"
"""The same for what is in host memory, where NCCL's groups have one of gloo beside them."""


class ThreadGroup(OwnGroup):
    """One member's end of a group.

    split_from: makes it by splitting the world, when torch has it connect.
    """

    def __init__(
        self,
        wire: LintContext,
        group: LintGroup,
        index: int,
        name: str,
        backend: str,
        split_from: "ThreadGroup | None" = None,
    ):
        super().__init__(index, len(group.ranks), name, backend)
        self._wire, self._group, self._split_from = wire, group, split_from
        self._global_rank = group.ranks[index]
        self._batch: tuple[object, PendingOp, int] | None = None

    # -- collectives, by the names that torch.distributed calls --------------------------

    def allreduce(self, tensors: list[Tensor], opts=None) -> ThreadWork:
        op = op_name(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        facts = (*_alike(tensors), ("op", op))
        return self._enter("all_reduce", facts, Payload(list(tensors), op=op))

    def reduce(self, tensors: list[Tensor], opts) -> ThreadWork:
        op = op_name(opts.reduceOp)
        facts = (*_alike(tensors), ("op", op), self._root(opts.rootRank))
        return self._enter("reduce", facts, Payload(list(tensors), op=op, root=opts.rootRank))

    def broadcast(self, tensors: list[Tensor], opts) -> ThreadWork:
        facts = (*_as_many(tensors), self._root(opts.rootRank))
        return self._enter("broadcast", facts, Payload(list(tensors), root=opts.rootRank))

    def allgather(self, outputs, inputs: list[Tensor], opts=None) -> ThreadWork:
        rooms = list(outputs[0])
        even = len({tuple(x.shape) for x in (*rooms, inputs[0])}) == 1
        facts = _alike(inputs if even else rooms)
        return self._enter("all_gather", facts, Payload(list(inputs), rooms))

    def _gather_evenly(self, output: Tensor, x: Tensor) -> ThreadWork:
        rooms = even_parts(output, x.numel(), self.size())
        return self._enter("all_gather", _alike([x]), Payload([x], rooms))

    def reduce_scatter(self, outputs: list[Tensor], inputs, opts=None) -> ThreadWork:
        op = op_name(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        even = len({tuple(x.shape) for x in (*inputs[0], outputs[0])}) == 1
        facts = (*_alike(outputs if even else inputs[0]), ("op", op))
        payload = Payload(list(inputs[0]), list(outputs), op)
        return self._enter("reduce_scatter", facts, payload)

    def _reduce_evenly(self, output: Tensor, x: Tensor, opts=None) -> ThreadWork:
        op = op_name(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        payload = Payload(even_parts(x, output.numel(), self.size()), [output], op)
        return self._enter("reduce_scatter", (*_alike([output]), ("op", op)), payload)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts=None) -> ThreadWork:
        facts = (("dtype", dtype_name(inputs[0].dtype)),)
        return self._enter("all_to_all", facts, Payload(list(inputs), list(outputs)))

    def gather(self, outputs, inputs: list[Tensor], opts) -> ThreadWork:
        facts = (*_alike(inputs), self._root(opts.rootRank))
        payload = Payload(list(inputs), list(outputs[0]) if outputs else [], root=opts.rootRank)
        return self._enter("gather", facts, payload)

    def scatter(self, outputs: list[Tensor], inputs, opts) -> ThreadWork:
        facts = (*_alike(outputs), self._root(opts.rootRank))
        payload = Payload(list(inputs[0]) if inputs else [], list(outputs), root=opts.rootRank)
        return self._enter("scatter", facts, payload)

    def barrier(self, opts=None) -> ThreadWork:
        return self._enter("barrier", (), Payload())

    def all_gather_single_coalesced(self, outputs, inputs, opts=None) -> ThreadWork:
        # calls of a group end in order, so the last one's end is that of all
        return [self._gather_evenly(o, x) for o, x in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None) -> ThreadWork:
        pairs = zip(outputs, inputs, strict=True)
        return [self._reduce_evenly(o, x, opts) for o, x in pairs][-1]

    # -- messages ----------------------------------------------------------------------

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> ThreadWork:
        return self._post("send", tensors[0], self._global_rank, self._group.ranks[target], tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> ThreadWork:
        return self._post("receive", tensors[0], self._group.ranks[source], self._global_rank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> ThreadWork:
        return self._post("receive", tensors[0], None, self._global_rank, tag)

    # -- what torch asks of a group ----------------------------------------------------

    @property
    def supports_splitting(self) -> bool:
        """As NCCL: torch connects a new group at once where it knows the device, and by a split of
        the world where that is bound to one."""
        return self._group.lazy

    def _get_backend(self, device: torch.device) -> "ThreadGroup":
        return self

    def eager_connect_single_device(self, device: torch.device) -> None:
        """The communicator is made; from a world that is bound all of its ranks make one each."""
        self._group.eager.add(self._global_rank)
        if self._split_from is not None:
            self._split_from.split(self._group.ranks)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Others make a group, and this rank is no member."""
        self.split(())

    def split(self, ranks: tuple[int, ...]) -> None:
        """Wait for all ranks to make one communicator each, this one that of `ranks`."""
        where, _ = self._wire.stack()
        entry = PendingOp(self._global_rank, self._wire.world, SPLIT, where=where, payload=ranks)
        self._wire.stop(entry)

    def shutdown(self) -> None:
        """Nothing is held that ends with the group."""

    # -- to the board ------------------------------------------------------------------

    def _enter(self, operation: str, facts: Facts, payload: Payload) -> ThreadWork:
        threads, call = self._wire.threads, OpSignature(operation, facts)
        where, _ = self._wire.stack()
        entry = PendingOp(self._global_rank, self._group, call, where=where, payload=payload)
        self._note(call, None)
        threads.act(entry.rank, partial(threads.board.issue, entry))
        self._wire.note(entry)
        return ThreadWork(self._wire, entry, payload.outputs or payload.inputs)

    def _post(
        self, operation: str, x: Tensor, source: int | None, target: int, tag: int
    ) -> ThreadWork:
        threads, call = self._wire.threads, OpSignature(operation, _as_many([x]))
        where, batch = self._wire.stack()
        message = P2POp(call, source, target, tag, where, x)
        self._note(call, message.peer)
        road = (source, target) if tag == TAG else None
        entry = self._entry_for(batch, where, road)
        threads.act(entry.rank, partial(threads.board.post, entry, message))
        return ThreadWork(self._wire, entry, [x], message)

    def _entry_for(self, batch: object, where: Where, road: Hashable) -> PendingOp:
        """The entry that a message belongs to: its batch's, or one of its own."""
        threads, num_messages = self._wire.threads, 1
        if batch is not None:
            if self._batch is not None and self._batch[0] is batch:
                _, entry, left = self._batch
                self._batch = (batch, entry, left - 1) if left > 1 else None
                return entry
            num_messages = len(batch.f_locals["p2p_op_list"])  # type: ignore[attr-defined]
        entry = PendingOp(
            *(self._global_rank, self._group, None, num_messages, where),
            channel=road,
            is_batch=batch is not None,
        )
        self._batch = (batch, entry, num_messages - 1) if num_messages > 1 else None
        threads.act(entry.rank, partial(threads.board.issue, entry))
        self._wire.note(entry)
        return entry

    def _note(self, call: OpSignature, peer: int | None) -> None:
        self._wire.calls[self._global_rank].append((self._group, call, peer))

    def _root(self, index: int) -> tuple[str, object]:
        return "root", self._group.ranks[index]


def carry(send: P2POp, receive: P2POp) -> None:
    """Move the data of a message, whose receiver then knows from whom it is."""
    data_movement.copy(send.payload, receive.payload)  # type: ignore[arg-type]
    receive.source = send.source
    send.payload = receive.payload = None


def _alike(tensors: Sequence[Tensor]) -> Facts:
    shapes = [tuple(x.shape) for x in tensors]
    shape = shapes[0] if len(shapes) == 1 else tuple(shapes)
    return (("shape", shape), ("dtype", dtype_name(tensors[0].dtype)))


def _as_many(tensors: Sequence[Tensor]) -> Facts:
    number = sum(x.numel() for x in tensors)
    return (("elements", number), ("dtype", dtype_name(tensors[0].dtype)))


# -- making groups -------------------------------------------------------------------------


class _Here(threading.local):
    """The wire of the lint that this thread is a rank of."""

    wire: LintContext | None = None


_here = _Here()


def attach(wire: LintContext) -> None:
    """This thread is a rank of the lint: groups that it makes are of threads."""
    _here.wire = wire
    for name in (BACKEND, HOST_BACKEND):
        if name.upper() not in dist.Backend._plugins:
            create = partial(_create, name)
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    queued = wire.queued
    register_transport(Transport(BACKEND, queued=queued, averages=queued, beside=HOST_BACKEND))


def _create(backend: str, options, _) -> ThreadGroup:
    wire = _here.wire
    if wire is None:
        raise CommError(f"backend {backend!r} joins the threads of a lint; use gloo or nccl")
    ranks = tuple(options.global_ranks_in_group or range(options.group_size))
    key, rank = (options.group_id, ranks), ranks[options.group_rank]
    with wire.threads.lock:
        if key not in wire.made:
            in_host = backend == HOST_BACKEND
            label = wire.label(ranks) + " (host)" * in_host
            group = LintGroup(ranks, label, lazy=wire.queued and not in_host, in_host=in_host)
            wire.made[key] = LintGroup(ranks, label), group
            wire.threads.groups += wire.made[key]
    making, group = wire.made[key]
    world = dist.group.WORLD if dist.is_initialized() else None
    split_from = world if world is not None and world.bound_device_id is not None else None
    if split_from is None or not group.lazy:
        wire.stop(PendingOp(rank, making, CREATION, where=stack_here()[0]))
    return ThreadGroup(
        wire,
        group,
        options.group_rank,
        options.group_id,
        backend,
        split_from,  # type: ignore[arg-type]
    )
