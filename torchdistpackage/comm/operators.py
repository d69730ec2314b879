"""The collectives of a graph: what `torch.compile` sees in place of primitives.py.

Eager code calls primitives.py, at its speed and with its record, checks and errors. While dynamo
traces, the maps of autograd.py become one operator each, `torchdistpackage::linear_map`, which
names its group. Its autograd kernel is made of torch's functional collectives, so what reaches a
back end such as inductor is `_c10d_functional` alone: a start, which gives memory of its own and
writes to none of its inputs, and a `wait_tensor`. Inductor knows these. It starts one where its
input is ready, may move the wait to the first use, and keeps all of a graph in the order in which
they were traced (its `decide_global_ordering_of_comms`), whatever else it reorders. Opaque
operators of our own it would move by memory alone, which uneven parts make differ between ranks.

All is static but lengths.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from torchdistpackage.comm.dtypes import as_added, from_added, to_bytes

Group = dist.ProcessGroup
Sizes = Sequence[int]

_calls = torch.ops._c10d_functional
_library = torch.library.Library("torchdistpackage", "FRAGMENT")
_IS_DEFINED = hasattr(torch.ops.torchdistpackage, "linear_map")
"""By an earlier import of this file: torch has no more than one operator of a name."""
if not _IS_DEFINED:
    _library.define(
        "linear_map(Tensor x, str kind, str group, int place, int size, int[] numbers, "
        "SymInt[]? first, SymInt[]? second) -> Tensor"
    )


def is_traced() -> bool:
    """Return whether dynamo or torch.export traces the caller, which then may not talk, nor look at
    numbers."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def name_of(group: Group) -> str:
    """By which a graph, and torch, finds the group again."""
    return group.group_name


def linear_map(
    x: Tensor,
    kind: str,
    group: Group,
    numbers: Sequence[int],
    first: Sizes | None,
    second: Sizes | None,
) -> Tensor:
    """The operator: the map of this kind, options and lengths, over a group.

    It names its rank's place, though the group knows it: what a graph becomes depends on it, and
    torch's caches of compiled graphs know a graph by its operators and their arguments. Ranks that
    share such a cache would otherwise run each other's graphs, with parts at the other's offset.
    """
    call = torch.ops.torchdistpackage.linear_map
    where = name_of(group), group.rank(), group.size()
    return call(x, kind, *where, list(numbers), _listed(first), _listed(second))


def define_linear_map(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let `run(x, kind, group, numbers, first, second)` be the operator, autograd included.

    autograd.py calls it, which knows the maps.
    """

    def kernel(x, kind, group, place, size, numbers, first, second):
        return run(x, kind, _resolve_process_group(group), tuple(numbers), first, second)

    if not _IS_DEFINED:
        _library.impl("linear_map", kernel, "Autograd")
        _library.impl("linear_map", kernel, "CompositeExplicitAutograd")  # under inference_mode
    return run


def _listed(sizes: Sizes | None) -> list[int] | None:
    return None if sizes is None else list(sizes)


# -- as those of primitives.py, along dim 0, but never in place --------------------------------


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """op: sum, max or min."""
    if group.size() == 1:
        return x
    wire = _calls.wait_tensor(_calls.all_reduce(as_added(x), op, name_of(group)))
    return from_added(wire, x.dtype)


def all_gather(x: Tensor, group: Group, sizes: Sizes | None = None) -> Tensor:
    """(n, ...) on each rank -> (sum of all n, ...), in group order."""
    size = group.size()
    if size == 1:
        return x
    wire = to_bytes(x)
    longest = wire.shape[0] if sizes is None else max(sizes)
    # even parts are what every back end has, so shorter ones are filled up
    wire = _calls.all_gather_into_tensor(_filled(wire, longest), size, name_of(group))
    wire = _calls.wait_tensor(wire)
    if sizes is not None:
        parts = wire.view(size, longest, *wire.shape[1:]).unbind(0)
        wire = torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])
    return _from_bytes(wire, x.dtype)


def reduce_scatter(x: Tensor, group: Group, sizes: Sizes | None = None) -> Tensor:
    """(sum of all n, ...) -> my (n, ...) of the sum over the group."""
    size = group.size()
    if size == 1:
        return x
    wire = as_added(x)
    if sizes is not None:
        longest = max(sizes)
        wire = torch.cat([_filled(part, longest) for part in wire.split(list(sizes))])
    wire = _calls.reduce_scatter_tensor(wire, "sum", size, name_of(group))
    wire = _calls.wait_tensor(wire)
    if sizes is not None:
        wire = wire[: sizes[group.rank()]]
    return from_added(wire, x.dtype)


def all_to_all(
    x: Tensor,
    group: Group,
    send_sizes: Sizes | None = None,
    receive_sizes: Sizes | None = None,
) -> Tensor:
    """(sum of all n, ...): piece i goes to rank i of the group; returns the pieces received."""
    size = group.size()
    if size == 1:
        return x
    sent = send_sizes or [x.shape[0] // size] * size
    received = receive_sizes or sent
    wire = _calls.all_to_all_single(to_bytes(x), list(received), list(sent), name_of(group))
    return _from_bytes(_calls.wait_tensor(wire), x.dtype)


def broadcast(x: Tensor, group: Group, source: int) -> Tensor:
    """That of global rank `source`, on every rank."""
    if group.size() == 1:
        return x
    place = dist.get_group_rank(group, source)
    wire = _calls.wait_tensor(_calls.broadcast(to_bytes(x), place, name_of(group)))
    return _from_bytes(wire, x.dtype)


def _filled(rows: Tensor, num: int) -> Tensor:
    """The rows with zeros below, `num` in all."""
    missing = num - rows.shape[0]
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows


def _from_bytes(wire: Tensor, dtype: torch.dtype) -> Tensor:
    return wire if wire.dtype == dtype else wire.view(dtype).squeeze(-1)
