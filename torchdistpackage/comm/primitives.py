"""The few torch.distributed calls that the rest of the package makes, none seen by autograd.

Groups of one rank are legal everywhere: here, and only here, they are short-circuited.
Rank arguments are global, as torch has them. Every call is noted in the record; errors of a
backend become CommError with the operation and the group's ranks in the text. With `async_op` a
collective returns a `Work`; what goes in must stay as it is until its `wait()`.
"""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
)

from torchdistpackage.comm import debug_checks
from torchdistpackage.comm.backends import device_of as device_of
from torchdistpackage.comm.backends import is_nccl as is_nccl
from torchdistpackage.comm.backends import is_queued as is_queued
from torchdistpackage.comm.backends import require_host_memory
from torchdistpackage.comm.backends import transport_of as transport_of
from torchdistpackage.comm.creation import ranks_of, world
from torchdistpackage.comm.creation import set_timeout as set_timeout
from torchdistpackage.comm.dtypes import (
    added,
    as_added,
    from_added,
    in_place_of,
    to_bytes,
    to_reducible,
)
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.transport.pairwise import GATHERED, SUMMED, pairwise
from torchdistpackage.comm.work import NO_FACTS, Work, run_async, run_sync
from torchdistpackage.errors import CommError, LayoutError

Group = dist.ProcessGroup
SUM, AVG, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN

WAITED_FOR_BYTES = 2**16
"""Up to this an even gather that the host waits for is gloo's own: what it costs is waiting, and
less of that where a thread of gloo posts the messages than where this one does, which then waits
for the connection too."""

Sizes = Sequence[int]
"""Lengths along one dim, one for each rank of a group, in its order; some may be 0."""
Result = Tensor | Any
"""The tensor; a `Work` that gives it, of a call with `async_op`."""


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


def check_sizes(
    x: Tensor,
    dim: int,
    sizes: Sizes | None,
    group: Group,
    *,
    cut: bool,
    name: str = "sizes",
    error: type[Exception] = LayoutError,
) -> tuple[int, ...] | None:
    """`sizes` of the parts of `dim` of x where it is `cut`, else of all ranks of which mine is x.

    None stays None: all are equal.

    Raises:
        error: they do not fit the length, or equal parts do not.
    """
    length = x.shape[dim]
    if sizes is None and not (cut and length % group.size()):
        return None
    place = f"dim {dim} of a tensor of shape {tuple(x.shape)} has {length} elements"
    if sizes is None:
        size = group.size()
        raise error(
            f"{place}, which {size} ranks cannot share evenly; use a multiple of {size}, or "
            f"pass {name}=, the length of each rank's part"
        )
    rank, known = group.rank(), sizes_of_ranks(sizes, group, name, error)
    if cut and sum(known) != length:
        raise error(
            f"{place}, but {name}={known} add up to {sum(known)}; pass lengths that add up to "
            f"{length}"
        )
    if not cut and known[rank] != length:
        raise error(
            f"{place}, but {name}={known} give {known[rank]} to this rank, number {rank} of its "
            f"group; pass what each rank holds, as exchange_sizes() finds it"
        )
    return known


def sizes_of_ranks(
    sizes: Sizes, group: Group, name: str, error: type[Exception] = LayoutError
) -> tuple[int, ...]:
    """`sizes` as one length, 0 or more, for each rank of the group.

    Raises:
        error: they are something else.
    """
    try:
        known = tuple(map(index, sizes))
    except TypeError as cause:
        raise error(f"{name}={sizes!r}: pass one whole number for each rank") from cause
    if len(known) != group.size() or min(known) < 0:
        raise error(
            f"{name}={known} for a group of {group.size()} ranks; pass one length for each of "
            f"them, 0 or more"
        )
    return known


# -- calls on the group itself -----------------------------------------------------------
# torch.distributed's functions are a dozen calls of Python more, which ask what is known here.

_HAS_SINGLE = hasattr(Group, "all_gather_single")
"""Whether torch is 2.13, which renamed the calls of one tensor."""


def _call_all_reduce(
    x: Tensor, op: dist.ReduceOp.RedOpType, group: Group, async_op: bool = False
) -> dist.Work | None:
    options = AllreduceOptions()
    options.reduceOp, options.asyncOp = op, async_op
    return _awaited(group.allreduce([x], options), async_op)


def gather_into(out: Tensor, x: Tensor, group: Group, async_op: bool = False) -> dist.Work | None:
    """`x` of all ranks, of equal shapes, one after another in `out`."""
    options = AllgatherOptions()
    options.asyncOp = async_op
    call = group.all_gather_single if _HAS_SINGLE else group._allgather_base
    return _awaited(call(out, x, options), async_op)


def scatter_into(out: Tensor, x: Tensor, group: Group, async_op: bool = False) -> dist.Work | None:
    """In `out` this rank's part of the sum of `x` over all ranks, of equal parts."""
    options = ReduceScatterOptions()
    options.reduceOp, options.asyncOp = SUM, async_op
    call = group.reduce_scatter_single if _HAS_SINGLE else group._reduce_scatter_base
    return _awaited(call(out, x, options), async_op)


def _awaited(work: dist.Work | None, async_op: bool) -> dist.Work | None:
    """What `torch.distributed` returns; of a call on the current stream NCCL gives no work."""
    if async_op or work is None:
        return work
    work.wait()
    return None


# -- collectives, along dim 0 ------------------------------------------------------------


def all_reduce(
    x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = SUM, async_op: bool = False
) -> Result:
    """Reduce `x` in place over the group and return it.

    Raises:
        CommError: the dtype cannot be reduced, or the backend failed.
    """
    if group.size() == 1:
        return Work(x) if async_op else x
    wire, finish = to_reducible(x, op)
    facts = (str(op),) if recorder.checks else NO_FACTS
    go = run_async if async_op else run_sync
    return go("all_reduce", group, x, facts, finish, _call_all_reduce, wire, op)


def start_all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = SUM) -> Work:
    """`all_reduce` with `async_op`: the communication hook of a bucket that names no other."""
    return all_reduce(x, group, op, True)


def all_gather(
    x: Tensor, group: Group, sizes: Sizes | None = None, async_op: bool = False
) -> Result:
    """(n, ...) on each rank -> (sum of all n, ...), in group order.

    sizes: the n of all ranks, where they differ.

    Raises:
        CommError: `sizes` does not say what this rank holds.
    """
    if group.size() == 1:
        return Work(x) if async_op else x
    state, lengths = state_of(group), _rows(x, group, sizes, cut=False)
    direct = state.direct
    is_even = sizes is None or lengths.count(lengths[0]) == len(lengths)
    if direct:
        require_host_memory("all_gather", group, x)
        direct = not is_even or async_op or x.nbytes > WAITED_FOR_BYTES
    mine, out = to_bytes(x), x.new_empty((sum(lengths), *x.shape[1:]))
    joined = out if mine.dtype is x.dtype else to_bytes(out)
    facts = NO_FACTS if sizes is None else ("rows of each rank", *lengths)
    go, ask = run_async if async_op else run_sync, ("all_gather", group, x, facts, lambda: out)
    if direct:
        return go(*ask, pairwise, GATHERED, [mine] * len(lengths), joined.split_with_sizes(lengths))
    if is_even:
        return go(*ask, gather_into, joined, mine)
    return go(*ask, dist.all_gather, list(joined.split(lengths)), mine)


def reduce_scatter(
    x: Tensor, group: Group, sizes: Sizes | None = None, async_op: bool = False
) -> Result:
    """(sum of all n, ...) -> my (n, ...) of the sum over the group.

    sizes: the n of all ranks, where they differ.

    Raises:
        CommError: the rows of `x` are not those of `sizes`, or do not divide evenly.
    """
    if group.size() == 1:
        return Work(x) if async_op else x
    state, lengths = state_of(group), _rows(x, group, sizes, cut=True)
    if state.direct:
        require_host_memory("reduce_scatter", group, x)
    facts = NO_FACTS if sizes is None else ("rows of each rank", *lengths)
    wire, ask = as_added(x), ("reduce_scatter", group, x, facts)
    go = run_async if async_op else run_sync
    if state.direct:
        parts, mine = wire.split_with_sizes(lengths), state.index
        buffers = [part if part is parts[mine] else torch.empty_like(parts[mine]) for part in parts]
        finish = lambda: from_added(added(buffers, mine), x.dtype)  # noqa: E731
        return go(*ask, finish, pairwise, SUMMED, parts, buffers)
    out = wire.new_empty((lengths[group.rank()], *wire.shape[1:]))
    finish = lambda: from_added(out, x.dtype)  # noqa: E731
    if sizes is None:
        return go(*ask, finish, scatter_into, out, wire)
    return go(*ask, finish, dist.reduce_scatter, out, list(wire.split(lengths)))


def all_to_all(
    x: Tensor,
    group: Group,
    send_sizes: Sizes | None = None,
    receive_sizes: Sizes | None = None,
    async_op: bool = False,
) -> Result:
    """(sum of all n, ...): piece i goes to rank i of the group; returns the pieces received.

    send_sizes: rows to each rank; receive_sizes: rows from each, both where they are not even.

    Raises:
        CommError: the rows of `x` are not those of `send_sizes`, or do not divide evenly.
    """
    if group.size() == 1:
        return Work(x) if async_op else x
    if (send_sizes is None) != (receive_sizes is None):
        raise CommError("all_to_all needs both send_sizes and receive_sizes, or neither")
    sent = _rows(x, group, send_sizes, cut=True, name="send_sizes")
    received = sent
    if receive_sizes is not None:
        received = list(sizes_of_ranks(receive_sizes, group, "receive_sizes", CommError))
    if state_of(group).direct:
        require_host_memory("all_to_all", group, x)
    out = x.new_empty((sum(received), *x.shape[1:]))
    if recorder.checks and send_sizes is not None:
        debug_checks.agree_pairs("all_to_all", group, sent, received)
    facts = NO_FACTS if send_sizes is None else ("rows vary",)
    ask = "all_to_all", group, x, facts, lambda: out
    splits = () if send_sizes is None else (received, sent)
    go = run_async if async_op else run_sync
    return go(*ask, dist.all_to_all_single, to_bytes(out), to_bytes(x), *splits)


def broadcast(x: Tensor, group: Group, source: int | None = None, async_op: bool = False) -> Result:
    """Overwrite `x` on all ranks with that of global rank `source` (default: the group's first).

    Raises:
        CommError: `source` is not in the group.
    """
    if group.size() == 1:
        return Work(x) if async_op else x
    source, wire = source_in(group, source), to_bytes(x)
    finish = in_place_of(x, wire)
    go = run_async if async_op else run_sync
    return go("broadcast", group, x, (source,), finish, dist.broadcast, wire, source)


def barrier(group: Group | None = None) -> None:
    """Return when every rank of the group (default: all) has come here."""
    group = group or world()
    if group.size() > 1:
        run_sync("barrier", group, None, (), None, dist.barrier)


def _rows(
    x: Tensor, group: Group, sizes: Sizes | None, *, cut: bool, name: str = "sizes"
) -> list[int]:
    """Rows of each rank."""
    if x.dim() == 0:
        raise CommError("a tensor of no dims has no rows to gather or scatter; use x.reshape(1)")
    size, num = group.size(), x.shape[0]
    if sizes is None and not (cut and num % size):
        return [num // size if cut else num] * size
    return list(check_sizes(x, 0, sizes, group, cut=cut, name=name, error=CommError) or ())


# -- objects: pickled, so only between own ranks -----------------------------------------


def gather_objects(value: object, group: Group | None = None) -> list[object]:
    """Small values of every rank, in group order; no device is waited for."""
    group = group or world()
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
    group, box = group or world(), [value]
    if group.size() > 1:
        source = source_in(group, source)
        send = dist.broadcast_object_list
        run_sync("broadcast_object", on_cpu(group), None, (source,), None, send, box, source)
    return box[0]
