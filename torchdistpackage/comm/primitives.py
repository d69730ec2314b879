"""The few torch.distributed calls that the rest of the package makes, none seen by autograd.

Groups of one rank are legal everywhere: here, and only here, they are short-circuited.
Rank arguments are global, as torch has them. Every call is noted in the record; errors of a
backend become CommError with the operation and the group's ranks in the text. Each collective
has a form that waits and a `start_` form that returns a `Work`.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm import debug_checks
from torchdistpackage.comm.backends import device_of as device_of
from torchdistpackage.comm.backends import is_nccl as is_nccl
from torchdistpackage.comm.backends import is_queued as is_queued
from torchdistpackage.comm.backends import require_host_memory
from torchdistpackage.comm.backends import transport_of as transport_of
from torchdistpackage.comm.companions import on_cpu
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.dtypes import (
    added,
    as_added,
    from_added,
    in_place_of,
    rows,
    to_bytes,
    to_reducible,
)
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.transport.pairwise import GATHERED, SUMMED, pairwise
from torchdistpackage.comm.work import NO_FACTS, IssueFn, Result, Work, run_async, run_sync
from torchdistpackage.errors import CommError

Group = dist.ProcessGroup
SUM, AVG, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN

# torch 2.13 renamed the flat collectives; the older names warn there
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Sizes = Sequence[int]
"""Rows of each rank of the group, in its order."""


def ranks_of(group: Group) -> tuple[int, ...]:
    """Global ranks of the group, in group order."""
    return tuple(dist.get_process_group_ranks(group))


def source_in(group: Group, source: int | None) -> int:
    """Global rank `source` (default: the group's first), which is in the group.

    Raises:
        CommError: it is not.
    """
    ranks = ranks_of(group)
    if source is None:
        return ranks[0]
    if source not in ranks:
        raise CommError(
            f"broadcast from rank {source}, which is not in the group of ranks {ranks}; "
            f"name one of them (ranks here are global)"
        )
    return source


# -- collectives -------------------------------------------------------------------------


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
    """Reduce `x` in place over the group and return it.

    Raises:
        CommError: the dtype cannot be reduced, or the backend failed.
    """
    return x if group.size() == 1 else _all_reduce(x, group, op, run_sync)


def start_all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = SUM) -> Work:
    """Begin to reduce `x` in place; it is ready after `wait()`."""
    return Work(x) if group.size() == 1 else _all_reduce(x, group, op, run_async)


def all_gather(x: Tensor, group: Group, sizes: Sizes | None = None) -> Tensor:
    """(n, ...) on each rank -> (sum of all n, ...), in group order.

    sizes: the n of all ranks, where they differ.

    Raises:
        CommError: `sizes` does not say what this rank holds.
    """
    return x if group.size() == 1 else _all_gather(x, group, sizes, run_sync)


def start_all_gather(x: Tensor, group: Group, sizes: Sizes | None = None) -> Work:
    """`all_gather`, begun; `x` must stay as it is until `wait()`."""
    return Work(x) if group.size() == 1 else _all_gather(x, group, sizes, run_async)


def reduce_scatter(x: Tensor, group: Group, sizes: Sizes | None = None) -> Tensor:
    """(sum of all n, ...) -> my (n, ...) of the sum over the group.

    sizes: the n of all ranks, where they differ.

    Raises:
        CommError: the rows of `x` are not those of `sizes`, or do not divide evenly.
    """
    return x if group.size() == 1 else _reduce_scatter(x, group, sizes, run_sync)


def start_reduce_scatter(x: Tensor, group: Group, sizes: Sizes | None = None) -> Work:
    """`reduce_scatter`, begun; `x` must stay as it is until `wait()`."""
    return Work(x) if group.size() == 1 else _reduce_scatter(x, group, sizes, run_async)


def all_to_all(
    x: Tensor, group: Group, send_sizes: Sizes | None = None, receive_sizes: Sizes | None = None
) -> Tensor:
    """(sum of all n, ...): piece i goes to rank i of the group; returns the pieces received.

    send_sizes: rows to each rank; receive_sizes: rows from each, both where they are not even.

    Raises:
        CommError: the rows of `x` are not those of `send_sizes`, or do not divide evenly.
    """
    return x if group.size() == 1 else _all_to_all(x, group, send_sizes, receive_sizes, run_sync)


def start_all_to_all(
    x: Tensor, group: Group, send_sizes: Sizes | None = None, receive_sizes: Sizes | None = None
) -> Work:
    """`all_to_all`, begun; `x` must stay as it is until `wait()`."""
    if group.size() == 1:
        return Work(x)
    return _all_to_all(x, group, send_sizes, receive_sizes, run_async)


def broadcast(x: Tensor, group: Group, source: int | None = None) -> Tensor:
    """Overwrite `x` on all ranks with that of global rank `source` (default: the group's first).

    Raises:
        CommError: `source` is not in the group.
    """
    return x if group.size() == 1 else _broadcast(x, group, source, run_sync)


def start_broadcast(x: Tensor, group: Group, source: int | None = None) -> Work:
    """`broadcast`, begun."""
    return Work(x) if group.size() == 1 else _broadcast(x, group, source, run_async)


def barrier(group: Group | None = None) -> None:
    """Return when every rank of the group (default: all) has come here."""
    group = _whole(group)
    if group.size() > 1:
        run_sync("barrier", group, None, (), None, dist.barrier)


# -- objects: pickled, so only between own ranks -----------------------------------------


def gather_objects(value: object, group: Group | None = None) -> list[object]:
    """Small values of every rank, in group order; no device is waited for."""
    group = _whole(group)
    values: list[object] = [value] * group.size()
    if group.size() > 1:
        run_sync(
            "gather_objects", on_cpu(group), None, (), None, dist.all_gather_object, values, value
        )
    return values


def broadcast_object(
    value: object, group: Group | None = None, source: int | None = None
) -> object:
    """The value that global rank `source` (default: the group's first) holds, on every rank."""
    group, box = _whole(group), [value]
    if group.size() > 1:
        source = source_in(group, source)
        send = dist.broadcast_object_list
        run_sync("broadcast_object", on_cpu(group), None, (source,), None, send, box, source)
    return box[0]


def set_timeout(group: Group, seconds: float) -> None:
    """How long a later operation of the group may take before it fails."""
    limit = timedelta(seconds=seconds)
    dist.distributed_c10d._set_pg_timeout(limit, group)
    if recorder.line(group).direct:  # with a limit, a wait on NCCL would block the host
        recorder.limit(group, limit)


# -- what each gives to the back end ------------------------------------------------------


def _all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType, go: IssueFn) -> Result:
    wire, finish = to_reducible(x, op)
    facts = (str(op),) if recorder.checks else NO_FACTS
    return go("all_reduce", group, x, facts, finish, dist.all_reduce, wire, op)


def _all_gather(x: Tensor, group: Group, sizes: Sizes | None, go: IssueFn) -> Result:
    direct, lengths = recorder.line(group).direct, rows(x, group, sizes, "mine")
    if direct:
        require_host_memory("all_gather", group, x)
    out = x.new_empty((sum(lengths), *x.shape[1:]))
    mine, whole = to_bytes(x), to_bytes(out)
    facts = NO_FACTS if sizes is None else ("rows of each rank", *lengths)
    ask = "all_gather", group, x, facts, lambda: out
    if direct:
        return go(*ask, pairwise, GATHERED, [mine] * len(lengths), whole.split(lengths))
    if sizes is None:
        return go(*ask, gather_into, whole, mine)
    return go(*ask, dist.all_gather, list(whole.split(lengths)), mine)


def _reduce_scatter(x: Tensor, group: Group, sizes: Sizes | None, go: IssueFn) -> Result:
    direct, lengths = recorder.line(group).direct, rows(x, group, sizes, "all")
    if direct:
        require_host_memory("reduce_scatter", group, x)
    facts = NO_FACTS if sizes is None else ("rows of each rank", *lengths)
    wire, ask = as_added(x), ("reduce_scatter", group, x, facts)
    length, shape = lengths[group.rank()], wire.shape[1:]
    if direct:
        room = [wire.new_empty((length, *shape)) for _ in lengths]
        finish = lambda: from_added(added(room), x.dtype)  # noqa: E731
        return go(*ask, finish, pairwise, SUMMED, wire.split(lengths), room)
    out = wire.new_empty((length, *shape))
    finish = lambda: from_added(out, x.dtype)  # noqa: E731
    if sizes is None:
        return go(*ask, finish, scatter_into, out, wire)
    return go(*ask, finish, dist.reduce_scatter, out, list(wire.split(lengths)))


def _all_to_all(
    x: Tensor, group: Group, send_sizes: Sizes | None, receive_sizes: Sizes | None, go: IssueFn
) -> Result:
    if (send_sizes is None) != (receive_sizes is None):
        raise CommError("all_to_all needs both send_sizes and receive_sizes, or neither")
    sent = rows(x, group, send_sizes, "all")
    received = sent if receive_sizes is None else list(receive_sizes)
    if len(received) != len(sent) or min(received) < 0:
        raise CommError(f"receive_sizes {received} must be {len(sent)} counts, one for each rank")
    if recorder.line(group).direct:
        require_host_memory("all_to_all", group, x)
    out = x.new_empty((sum(received), *x.shape[1:]))
    if recorder.checks and send_sizes is not None:
        debug_checks.agree_pairs("all_to_all", group, sent, received)
    facts = NO_FACTS if send_sizes is None else ("rows vary",)
    ask = "all_to_all", group, x, facts, lambda: out
    splits = () if send_sizes is None else (received, sent)
    return go(*ask, dist.all_to_all_single, to_bytes(out), to_bytes(x), *splits)


def _broadcast(x: Tensor, group: Group, source: int | None, go: IssueFn) -> Result:
    source = source_in(group, source)
    wire = to_bytes(x)
    finish = in_place_of(x, wire)
    return go("broadcast", group, x, (source,), finish, dist.broadcast, wire, source)


def _whole(group: Group | None) -> Group:
    return world() if group is None else group
