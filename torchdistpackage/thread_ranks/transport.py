"""A back end of torch.distributed whose ranks are threads.

The board decides when a call is done (matcher.py), and threads.py which rank runs meanwhile. Each
rank's trace lists in order what it issued and waited for, for later checks (harness/lint).

As with NCCL, members wait for each other to create a group. In a world that is bound to a device,
torch makes all ranks of the world take part, each with the list of its own group
(`ThreadGroup.split`). Only the lint compares those lists.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from torchdistpackage.comm.backends import Transport, register_transport
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.comm.tensor_channel import TAG
from torchdistpackage.errors import CommError
from torchdistpackage.thread_ranks.matcher import (
    CREATION,
    SPLIT,
    START,
    Disagreement,
    Facts,
    LintGroup,
    OpSignature,
    P2POp,
    PendingOp,
    Where,
    stack_here,
)
from torchdistpackage.thread_ranks.own_backend import (
    Collective,
    OwnGroup,
    OwnWork,
    Tensors,
    combined,
    copy,
    flat,
)
from torchdistpackage.thread_ranks.threads import Threads

BACKEND = "threads"
"""Name of the back end of thread ranks; it stands for NCCL if calls are queued."""
HOST_BACKEND = "threads_host"
"""Name of the back end for tensors in host memory; it stands for the gloo group beside NCCL's."""


@dataclass
class LintContext:
    """The state that all groups of one set of thread ranks share.

    world: the group of all ranks, in which they meet to split it. queued: it stands for NCCL.
    label: returns the name of the group of these ranks. created: by torch's name and the ranks of a
    group, the group in which members meet to create it, and the group itself.
    """

    threads: Threads
    world: LintGroup
    queued: bool
    label: Callable[[tuple[int, ...]], str]
    created: dict[tuple[str, tuple[int, ...]], tuple[LintGroup, LintGroup]] = field(
        default_factory=dict
    )
    traces: list[list[tuple[PendingOp, bool]]] = field(default_factory=list)
    """For each rank, in order, the entries that it issued (False) or waited for (True)."""
    setup: list[list[tuple[PendingOp, bool]]] = field(default_factory=list)
    """The ranks' entries before the step, set once all ranks are there."""
    stacks: dict[Where, Where] = field(default_factory=dict)
    """Each stack once, because a step makes most of its calls from a few places."""

    def issue(self, entry: PendingOp) -> None:
        """Issue an entry, and add it to the rank's trace."""
        self.threads.act(entry.rank, partial(self.threads.board.issue, entry))
        self.traces[entry.rank].append((entry, False))

    def wait(self, entry: PendingOp) -> None:
        """Block the rank until the entry is done."""
        self.threads.wait(entry.rank, entry)
        self.traces[entry.rank].append((entry, True))

    def stop(self, entry: PendingOp) -> None:
        """Issue an entry and wait for it."""
        self.issue(entry)
        self.wait(entry)

    def start(self, rank: int) -> None:
        """Begin the step once all ranks have their groups; numbers of calls restart at 1."""
        entry = PendingOp(rank, self.world, START)
        self.threads.act(rank, partial(self.threads.board.issue, entry))
        self.threads.wait(rank, entry)
        if not self.setup:
            self.setup, self.traces = self.traces, [[] for _ in self.traces]
            for _, group in self.created.values():
                group.count_anew()

    def stack(self) -> tuple[Where, object]:
        """Return the caller's stack (equal ones share an object), and its batch's frame."""
        where, batch = stack_here()
        return self.stacks.setdefault(where, where), batch


class ThreadWork(OwnWork):
    """The handle of a call: `wait` lets other ranks run until it is done."""

    def __init__(
        self,
        context: LintContext,
        entry: PendingOp,
        result: Tensors,
        message: P2POp | None = None,
    ):
        super().__init__(result)
        self._context, self._entry, self._message = context, entry, message

    def wait(self, timeout: timedelta | None = None) -> bool:
        # hands the turn to other ranks, because one of them completes the entry
        self._context.wait(self._entry)
        return True

    def is_completed(self) -> bool:
        if not self._entry.done:
            self._context.threads.pause(self._entry.rank)
        if self._entry.done:
            self._context.traces[self._entry.rank].append((self._entry, True))
        return self._entry.done

    def is_success(self) -> bool:
        return self._entry.done

    def _source_rank(self) -> int:
        source = None if self._message is None else self._message.source
        return -1 if source is None else self._entry.group.ranks.index(source)

    source_rank = _source_rank


class ThreadGroup(OwnGroup):
    """One member's end of a group. split_from: the world, which torch splits to connect."""

    def __init__(
        self,
        context: LintContext,
        group: LintGroup,
        index: int,
        name: str,
        backend: str,
        split_from: "ThreadGroup | None" = None,
    ):
        super().__init__(index, len(group.ranks), name, backend)
        self._context, self._group, self._split_from = context, group, split_from
        self._global_rank = group.ranks[index]
        self._batch: tuple[object, PendingOp, int] | None = None

    def collective(self, call: Collective, is_async: bool) -> ThreadWork:
        signature = OpSignature(call.operation, self._facts(call))
        where, _ = self._context.stack()
        entry = PendingOp(self._global_rank, self._group, signature, where=where, payload=call)
        self._context.issue(entry)
        return ThreadWork(self._context, entry, call.writes or call.like)

    def _facts(self, call: Collective) -> Facts:
        """Return the facts on which members must agree; for uneven parts all shapes."""
        if call.operation == "barrier":
            return ()
        tensors = call.like
        parts = {"all_gather": call.writes, "reduce_scatter": flat(call.sends)}
        if (all_ := parts.get(call.operation)) and len({x.shape for x in (*tensors, *all_)}) > 1:
            tensors = all_
        shapes = [tuple(x.shape) for x in tensors]
        shape: Facts = (("shape", shapes[0] if len(shapes) == 1 else tuple(shapes)),)
        sizes = {"all_to_all": (), "broadcast": _num_elements(tensors)}
        dtype = ("dtype", dtype_name(tensors[0].dtype))
        op = (("op", call.op),) if call.op else ()
        root = () if call.root is None else (("root", self._group.ranks[call.root]),)
        return (*sizes.get(call.operation, shape), dtype, *op, *root)

    # -- messages ----------------------------------------------------------------------

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> ThreadWork:
        return self._post("send", tensors[0], self._global_rank, self._group.ranks[target], tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> ThreadWork:
        return self._post("receive", tensors[0], self._group.ranks[source], self._global_rank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> ThreadWork:
        return self._post("receive", tensors[0], None, self._global_rank, tag)

    def _post(
        self, operation: str, x: Tensor, source: int | None, target: int, tag: int
    ) -> ThreadWork:
        """Post a message as part of its batch, or alone."""
        threads = self._context.threads
        call = OpSignature(operation, (*_num_elements([x]), ("dtype", dtype_name(x.dtype))))
        where, batch = self._context.stack()
        message = P2POp(call, source, target, tag, where, x)
        entry = self._entry_for(batch, where, (source, target) if tag == TAG else None)
        threads.act(entry.rank, partial(threads.board.post, entry, message))
        return ThreadWork(self._context, entry, [x], message)

    def _entry_for(self, batch: object, where: Where, road: Hashable) -> PendingOp:
        """Return the entry that a message belongs to: its batch's, or one of its own."""
        num_messages = 1
        if batch is not None:
            if self._batch is not None and self._batch[0] is batch:
                _, entry, num_left = self._batch
                self._batch = (batch, entry, num_left - 1) if num_left > 1 else None
                return entry
            num_messages = len(batch.f_locals["p2p_op_list"])  # type: ignore[attr-defined]
        entry = PendingOp(
            self._global_rank,
            self._group,
            None,
            num_messages,
            where,
            channel=road,
            is_batch=batch is not None,
        )
        self._batch = (batch, entry, num_messages - 1) if num_messages > 1 else None
        self._context.issue(entry)
        return entry

    # -- what torch asks of a group ----------------------------------------------------

    @property
    def supports_splitting(self) -> bool:
        """True if torch connects a new group at once, as it does with NCCL if it knows the device.

        If the world is bound to a device, torch connects the group by a split of the world.
        """
        return self._group.lazy

    def _get_backend(self, device: torch.device) -> Any:
        # only a world that is bound to a device is split
        is_split = _handed_on is not None and self.bound_device_id is not None
        return _handed_on(self) if is_split else self

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Create the communicator; with a bound world all of its ranks create one each."""
        self._group.eager.add(self._global_rank)
        if self._split_from is not None:
            self._split_from.split(self._group.ranks)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Take part in a split without becoming a member of a group."""
        self.split(())

    def split(self, ranks: tuple[int, ...]) -> None:
        """Wait until each rank creates its communicator; this rank's is that of `ranks`."""
        where, _ = self._context.stack()
        world = self._context.world
        self._context.stop(PendingOp(self._global_rank, world, SPLIT, where=where, payload=ranks))

    def shutdown(self) -> None:
        """Do nothing: the group holds no resource."""


def _num_elements(tensors: Tensors) -> Facts:
    """Return the fact that states the total number of elements."""
    return (("elements", sum(x.numel() for x in tensors)),)


# -- moving the data -----------------------------------------------------------------------

_ONE_SIZE = ("all_reduce", "reduce", "broadcast", "barrier")
"""Operations whose facts state one size for all ranks."""


@torch.no_grad()
def deliver(entries: list[PendingOp]) -> None:
    """Move the data of a collective that all members (in group order) have entered.

    It reads all inputs before it writes any output, and sums in group order, so that the same
    inputs give the same bits.

    Raises:
        Disagreement: a member does not expect what another one sends.
    """
    if entries[0].call == SPLIT:
        _check_split(entries)
    if entries[0].call in (CREATION, SPLIT, START):
        return
    calls: list[Collective] = [entry.payload for entry in entries]  # type: ignore[misc]
    results_by_inputs: dict[tuple[int, ...], list[Tensor]] = {}  # one for all that get the same
    written: list[tuple[Tensor, Tensor]] = []
    for j, target in enumerate(calls):
        sent = [source.sends[j] for source in calls]
        uneven = target.operation not in _ONE_SIZE
        for i, room in enumerate(target.rooms if uneven else ()):
            _check_sizes(entries[i], entries[j], sent[i], room)
        key = tuple(map(id, sent))
        if target.writes and key not in results_by_inputs:  # a root may send to itself
            parts = zip(*sent, strict=True) if target.op else ((x,) for x in flat(sent))
            results_by_inputs[key] = [combined(same, target.op or "sum") for same in parts]
        written += zip(results_by_inputs.get(key, ()), target.writes, strict=False)
    for value, x in written:
        copy(value, x)


def carry(send: P2POp, receive: P2POp) -> None:
    """Move the data of a message, and tell its receiver the sender."""
    copy(send.payload, receive.payload)  # type: ignore[arg-type]
    receive.source = send.source
    send.payload = receive.payload = None


def _check_sizes(one: PendingOp, other: PendingOp, sent: Tensors, rooms: Tensors) -> None:
    """Raise Disagreement if a rank sends tensors that do not fit another's."""
    for x, room in zip(sent, rooms, strict=False):
        if x.numel() != room.numel():
            assert one.call is not None
            raise Disagreement(
                one,
                other,
                f"in {one.call.operation} {one.number} rank {one.rank} gives rank {other.rank} "
                f"{tuple(x.shape)}, but that has room for {tuple(room.shape)}",
            )


def _check_split(entries: Sequence[PendingOp]) -> None:
    """Raise Disagreement if ranks of one new group name different members.

    Each rank names the ranks of its communicator, or none. NCCL would give those that name the same
    ranks a smaller communicator of their own.
    """
    lists: list[tuple[int, ...]] = [entry.payload for entry in entries]  # type: ignore[misc]
    for first, ranks in zip(entries, lists, strict=True):
        members = tuple(
            e.rank for e, listed_ranks in zip(entries, lists, strict=True) if listed_ranks == ranks
        )
        if missing := [rank for rank in ranks if rank not in members]:
            other = entries[missing[0]]
            does = lists[other.rank]
            raise Disagreement(
                first,
                other,
                f"in split {first.number} rank {first.rank} makes the group of ranks {ranks}, and "
                f"rank {other.rank} {f'that of ranks {does}' if does else 'none'}: ranks {members} "
                f"alone get a communicator, and nothing says so",
            )


# -- making groups -------------------------------------------------------------------------


class _SplitSource(c10d.Backend):
    """The back end of a group that torch passes to C++ to split another group from it."""

    def __init__(self, group: ThreadGroup):
        super().__init__(group.rank(), group.size())
        self._group = group

    @property
    def supports_splitting(self) -> bool:
        return self._group.supports_splitting

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._group.eager_connect_single_device(device)

    def perform_nocolor_split(self, device: torch.device) -> None:
        self._group.perform_nocolor_split(device)


# torch 2.14 asks for this class; before, it takes the group itself, and Python cannot make it.
_handed_on = _SplitSource if hasattr(c10d._DistributedBackendOptions, "split_from") else None


class _Here(threading.local):
    """The set of thread ranks that this thread belongs to."""

    context: LintContext | None = None


_here = _Here()


def attach(context: LintContext) -> None:
    """Make this thread a rank: groups that it creates consist of threads."""
    _here.context = context
    for name in (BACKEND, HOST_BACKEND):
        if name.upper() not in dist.Backend._plugins:
            create = partial(_create, name)
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu", "cuda"])
    queued = context.queued
    register_transport(
        Transport(BACKEND, queued=queued, averages=queued, host_backend=HOST_BACKEND)
    )


def _create(backend: str, options, _) -> ThreadGroup:
    """Create this rank's end of a group; members wait for each other."""
    context = _here.context
    if context is None:
        raise CommError(f"backend {backend!r} is only for ranks as threads; use gloo or nccl")
    ranks = tuple(options.global_ranks_in_group or range(options.group_size))
    key, index = (options.group_id, ranks), options.group_rank
    with context.threads.lock:
        if key not in context.created:
            in_host = backend == HOST_BACKEND
            label = context.label(ranks) + " (host)" * in_host
            group = LintGroup(ranks, label, lazy=context.queued and not in_host, in_host=in_host)
            context.created[key] = LintGroup(ranks, label), group
            context.threads.groups += context.created[key]
    making, group = context.created[key]
    world = dist.group.WORLD if dist.is_initialized() else None
    split_from = world if world is not None and world.bound_device_id is not None else None
    if split_from is None or not group.lazy:
        context.stop(PendingOp(ranks[index], making, CREATION, where=stack_here()[0]))
    return ThreadGroup(context, group, index, options.group_id, backend, split_from)  # type: ignore[arg-type]
