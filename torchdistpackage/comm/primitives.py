"""The few torch.distributed calls that the package makes; they have no autograd.

Groups of one rank are allowed everywhere; only this file short-circuits them. Rank arguments are
global, as in torch. Every call is recorded. Errors of a back end become CommError, with the
operation and the group's ranks. With `async_op` a collective returns a `Work`, and its input must
not change until its `wait()`.
"""

from collections.abc import Callable, Sequence
from operator import index
from typing import Any, cast

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
from torchdistpackage.comm.stored_objects import ForEach as ForEach
from torchdistpackage.comm.stored_objects import run_stored, stored_objects
from torchdistpackage.comm.transport.pairwise import GATHERED, SUMMED, pairwise
from torchdistpackage.comm.work import NO_FACTS, Work, run_async, run_sync
from torchdistpackage.errors import CommError, LayoutError

Group = dist.ProcessGroup
SUM, AVG, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN

WAITED_FOR_BYTES = 2**16
"""Largest size at which an even, synchronous all-gather uses gloo's own.

Its cost is waiting, which is shorter if a thread of gloo posts the messages: if this thread posts
them, it waits for the connection too."""

Sizes = Sequence[int]
"""Lengths along one dim, one for each rank of a group, in its order; some may be 0."""
Result = Tensor | Any
"""A tensor, or with `async_op` a `Work` that returns it."""


def source_in(group: Group, source: int | None) -> int:
    """Return global rank `source` (default: the group's first), checked to be in the group.

    Raises:
        CommError: it is not in the group.
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
    """Check `sizes` against a dim of x, and return them as a tuple; None (all equal) stays None.

    cut: x is cut into these lengths. Otherwise x is this rank's tensor, and sizes are the lengths
    of all ranks.

    Raises:
        error: the sizes, or equal sizes, do not fit the length.
    """
    length = x.shape[dim]
    if sizes is None and not (cut and length % group.size()):
        return None
    description = f"dim {dim} of a tensor of shape {tuple(x.shape)} has {length} elements"
    if sizes is None:
        size = group.size()
        raise error(
            f"{description}, which {size} ranks cannot share evenly; use a multiple of {size}, or "
            f"pass {name}=, the length of each rank's part"
        )
    rank, lengths = group.rank(), sizes_of_ranks(sizes, group, name, error)
    if cut and sum(lengths) != length:
        raise error(
            f"{description}, but {name}={lengths} add up to {sum(lengths)}; pass lengths that "
            f"add up to "
            f"{length}"
        )
    if not cut and lengths[rank] != length:
        raise error(
            f"{description}, but {name}={lengths} give {lengths[rank]} to this rank, number "
            f"{rank} of its "
            f"group; pass what each rank holds, as exchange_sizes() finds it"
        )
    return lengths


def sizes_of_ranks(
    sizes: Sizes, group: Group, name: str, error: type[Exception] = LayoutError
) -> tuple[int, ...]:
    """Return `sizes` as a tuple with one length, 0 or more, for each rank of the group.

    Raises:
        error: they are not such lengths.
    """
    try:
        lengths = tuple(map(index, sizes))
    except TypeError as cause:
        raise error(f"{name}={sizes!r}: pass one whole number for each rank") from cause
    if len(lengths) != group.size() or min(lengths) < 0:
        raise error(
            f"{name}={lengths} for a group of {group.size()} ranks; pass one length for each of "
            f"them, 0 or more"
        )
    return lengths


# -- calls on the group itself -----------------------------------------------------------
# torch.distributed's own functions add a dozen Python calls that check what is known here.

_HAS_SINGLE = hasattr(Group, "all_gather_single")
"""True from torch 2.13 on, which renamed the calls that take a single tensor."""


def _call_all_reduce(
    x: Tensor, op: dist.ReduceOp.RedOpType, group: Group, async_op: bool = False
) -> dist.Work | None:
    """Reduce `x` in place."""
    options = AllreduceOptions()
    options.reduceOp, options.asyncOp = op, async_op
    return _awaited(group.allreduce([x], options), async_op)


def gather_into(out: Tensor, x: Tensor, group: Group, async_op: bool = False) -> dist.Work | None:
    """Gather `x` of all ranks, equally shaped, one after another into `out`."""
    options = AllgatherOptions()
    options.asyncOp = async_op
    call = group.all_gather_single if _HAS_SINGLE else group._allgather_base
    return _awaited(call(out, x, options), async_op)


def scatter_into(out: Tensor, x: Tensor, group: Group, async_op: bool = False) -> dist.Work | None:
    """Write this rank's slice of the sum of `x` over all ranks to `out`; slices are equal."""
    options = ReduceScatterOptions()
    options.reduceOp, options.asyncOp = SUM, async_op
    call = group.reduce_scatter_single if _HAS_SINGLE else group._reduce_scatter_base
    return _awaited(call(out, x, options), async_op)


def _awaited(work: dist.Work | None, async_op: bool) -> dist.Work | None:
    """Wait for a work unless `async_op`, as torch.distributed does."""
    if async_op or work is None:  # NCCL returns no work for a call on the current stream
        return work
    work.wait()
    return None


# -- collectives, along dim 0 ------------------------------------------------------------


def all_reduce(
    x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = SUM, async_op: bool = False
) -> Result:
    """Reduce `x` in place over the group and return it.

    Raises:
        CommError: the dtype cannot be reduced, or the back end failed.
    """
    if group.size() == 1:
        return Work(x) if async_op else x
    wire, finish = to_reducible(x, op)
    facts = (str(op),) if recorder.checks else NO_FACTS
    go = run_async if async_op else run_sync
    return go("all_reduce", group, x, facts, finish, _call_all_reduce, wire, op)


def start_all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = SUM) -> Work:
    """Start an all-reduce; this is the default communication hook of a bucket."""
    return all_reduce(x, group, op, True)


def all_gather(
    x: Tensor, group: Group, sizes: Sizes | None = None, async_op: bool = False
) -> Result:
    """Gather (n, ...) on each rank to (sum of all n, ...), in group order.

    sizes: the n of all ranks, if they differ.

    Raises:
        CommError: `sizes` disagrees with this rank's tensor.
    """
    if group.size() == 1:
        return Work(x) if async_op else x
    state, lengths = state_of(group), _rows(x, group, sizes, cut=False)
    direct = state.direct
    is_even = sizes is None or lengths.count(lengths[0]) == len(lengths)
    if direct:
        require_host_memory("all_gather", group, x)
        direct = not is_even or async_op or x.nbytes > WAITED_FOR_BYTES
    wire = to_bytes(x)
    out = x.new_empty((sum(lengths), *x.shape[1:]))
    joined = out if wire.dtype is x.dtype else to_bytes(out)
    facts = NO_FACTS if sizes is None else ("rows of each rank", *lengths)
    go, ask = run_async if async_op else run_sync, ("all_gather", group, x, facts, lambda: out)
    if direct:
        return go(*ask, pairwise, GATHERED, [wire] * len(lengths), joined.split_with_sizes(lengths))
    if is_even:
        return go(*ask, gather_into, joined, wire)
    return go(*ask, dist.all_gather, list(joined.split(lengths)), wire)


def reduce_scatter(
    x: Tensor, group: Group, sizes: Sizes | None = None, async_op: bool = False
) -> Result:
    """Reduce (sum of all n, ...) to this rank's (n, ...) of the sum over the group.

    sizes: the n of all ranks, if they differ.

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
        parts, own_index = wire.split_with_sizes(lengths), state.index
        buffers = [
            part if part is parts[own_index] else torch.empty_like(parts[own_index])
            for part in parts
        ]
        finish = lambda: from_added(added(buffers, own_index), x.dtype)  # noqa: E731
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
    """Send slice i of (sum of all n, ...) to rank i of the group; return the slices received.

    send_sizes: rows to each rank. receive_sizes: rows from each rank. Both are needed if rows are
        not even.

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
    """Wait until every rank of the group (default: all ranks) has called this."""
    group = group or world()
    if group.size() > 1:
        run_sync("barrier", group, None, (), None, dist.barrier)


def _rows(
    x: Tensor, group: Group, sizes: Sizes | None, *, cut: bool, name: str = "sizes"
) -> list[int]:
    """Return the rows of each rank; refuse sizes that do not fit."""
    if x.dim() == 0:
        raise CommError("a tensor without dims has no rows to gather or scatter; use x.reshape(1)")
    size, num = group.size(), x.shape[0]
    if sizes is None and not (cut and num % size):
        return [num // size if cut else num] * size
    return list(check_sizes(x, 0, sizes, group, cut=cut, name=name, error=CommError) or ())


# -- objects, pickled, so only between your own ranks ------------------------------------


def gather_objects(value: object, group: Group | None = None) -> list[object]:
    """Return small values of every rank, in group order, without waiting for a device.

    Over many ranks use `reduce_objects`, because here each rank reads all values.
    """
    group = group or world()
    values: list[object] = [value] * group.size()
    if group.size() > 1:
        if (objects := stored_objects(group)) is not None:
            gathered = run_stored("gather_objects", objects, lambda: objects.reduce(value, list))
            return cast(list[object], gathered)
        run_sync(
            "gather_objects", on_cpu(group), None, (), None, dist.all_gather_object, values, value
        )
    return values


def reduce_objects(
    value: object, make: Callable[[list[object]], object], group: Group | None = None
) -> object:
    """Return on every rank the result of `make`, which runs on the group's first rank with the
    values of all ranks.

    make: called on the first rank only, with the values in group order. It may return a `ForEach`
    with one answer for each rank.

    Raises:
        CommError: `make` raised something; there it is raised as it is.
    """
    group = group or world()
    if group.size() == 1:
        answer = make([value])
        return answer.answers[0] if isinstance(answer, ForEach) else answer
    if (objects := stored_objects(group)) is not None:
        return run_stored("reduce_objects", objects, lambda: objects.reduce(value, make))
    values = gather_objects(value, group)
    box, cause = (None, ""), None
    if group.rank() == 0:
        try:
            box = make(values), ""
        except Exception as error:  # the others wait for an answer
            box, cause = (None, f"rank {ranks_of(group)[0]}: {error}"), error
    answer, problem = cast(tuple[object, str], broadcast_object(box, group))
    if cause is not None:
        raise cause
    if problem:
        raise CommError(problem)
    return answer.answers[group.rank()] if isinstance(answer, ForEach) else answer


def collect_objects(value: object, group: Group | None = None) -> list[object] | None:
    """Return the values of every rank, in group order, on the group's first rank; None on the
    others.
    """
    collected: list[object] = []
    reduce_objects(value, collected.extend, group)
    return collected or None


def broadcast_object(
    value: object, group: Group | None = None, source: int | None = None
) -> object:
    """Return the value of global rank `source` (default: the group's first) on every rank."""
    group, box = group or world(), [value]
    if group.size() > 1:
        source = source_in(group, source)
        if (objects := stored_objects(group)) is not None:
            send_stored = lambda: objects.broadcast(value, source)  # noqa: E731
            return run_stored("broadcast_object", objects, send_stored)
        send = dist.broadcast_object_list
        run_sync("broadcast_object", on_cpu(group), None, (source,), None, send, box, source)
    return box[0]
