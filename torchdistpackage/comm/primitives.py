"""The few torch.distributed calls that the rest of the package makes, none seen by autograd.

Groups of one rank are legal everywhere: here, and only here, they are short-circuited.
Rank arguments are global, as torch has them. Errors of a backend become CommError with
the operation and the group's ranks in the text.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.errors import CommError

Group = dist.ProcessGroup
SUM, AVG, MAX, MIN = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN

# torch 2.13 renamed the flat collectives; the older names warn there
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Pending:
    """A collective under way: `wait()` before reading the tensor.

    On CUDA `wait` makes the current stream wait, not the host.
    """

    __slots__ = ("_work",)

    def __init__(self, work: dist.Work | None):
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


DONE = Pending(None)


def ranks_of(group: Group) -> tuple[int, ...]:
    """Global ranks of the group, in group order."""
    return tuple(dist.get_process_group_ranks(group))


def is_nccl(group: Group) -> bool:
    return dist.get_backend(group) == "nccl"


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = SUM) -> Tensor:
    """Reduce `x` in place over the group and return it."""
    if group.size() > 1:
        with named("all_reduce", group):
            dist.all_reduce(x, op=op, group=group)
    return x


def start_all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = SUM) -> Pending:
    """Begin to reduce `x` in place; it is ready after `wait()`."""
    if group.size() == 1:
        return DONE
    with named("all_reduce", group):
        return Pending(dist.all_reduce(x, op=op, group=group, async_op=True))


def all_gather(x: Tensor, group: Group) -> Tensor:
    """(n, ...) on each rank -> (size * n, ...), in group order; equal shapes on all ranks."""
    if group.size() == 1:
        return x
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    with named("all_gather", group):
        _gather_into(out, x.contiguous(), group=group)
    return out


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """(size * n, ...) -> my (n, ...) of the sum over the group."""
    if group.size() == 1:
        return x
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    with named("reduce_scatter", group):
        _scatter_into(out, x.contiguous(), group=group)
    return out


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """(size * n, ...): piece i goes to rank i of the group; returns the pieces received."""
    if group.size() == 1:
        return x
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    with named("all_to_all", group):
        dist.all_to_all_single(out, x.contiguous(), group=group)
    return out


def broadcast(x: Tensor, group: Group, source: int | None = None) -> Tensor:
    """Overwrite `x` on all ranks with that of global rank `source` (default: the group's first).

    Raises:
        CommError: `source` is not in the group.
    """
    if group.size() == 1:
        return x
    ranks = ranks_of(group)
    source = ranks[0] if source is None else source
    if source not in ranks:
        raise CommError(
            f"broadcast from rank {source}, which is not in the group of ranks {ranks}; "
            f"name one of them (ranks here are global)"
        )
    with named("broadcast", group):
        dist.broadcast(x, source, group=group)
    return x


def barrier(group: Group | None = None) -> None:
    """Return when every rank of the group (default: all) has come here."""
    if group is None or group.size() > 1:
        dist.barrier(group=group)


def gather_objects(value: object, group: Group | None = None) -> list[object]:
    """Small values of every rank, in group order. They are pickled: only between own ranks."""
    size = dist.get_world_size(group)
    values: list[object] = [None] * size
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast_object(value: object, group: Group | None = None) -> object:
    """The value that the group's first rank holds, on every rank."""
    box = [value]
    source = 0 if group is None else ranks_of(group)[0]
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]


def set_timeout(group: Group, seconds: float) -> None:
    """How long a later operation of the group may take before it fails."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


@contextmanager
def named(operation: str, group: Group) -> Iterator[None]:
    """Say which operation, over which ranks, a backend's error belongs to."""
    try:
        yield
    except RuntimeError as error:
        raise CommError(f"{operation} over ranks {ranks_of(group)} failed: {error}") from error
