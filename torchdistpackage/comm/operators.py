"""Collectives for graphs of `torch.compile`, in place of those of primitives.py.

Eager code calls primitives.py, with its speed, record, checks and errors. While dynamo traces, each
map of autograd.py becomes one operator, `torchdistpackage::linear_map`, which names its group. Its
autograd kernel uses torch's functional collectives, so a back end such as inductor sees only
`_c10d_functional`: a start, which allocates its output and writes to no input, and a `wait_tensor`.
Inductor knows these. It starts one when its input is ready, may move the wait to the first use, and
keeps all collectives of a graph in traced order (its `decide_global_ordering_of_comms`), whatever
else it reorders. It would reorder opaque operators of our own by their memory, which differs
between ranks with uneven slices.

Everything is static except lengths.
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
"""True if an earlier import of this file defined the operator; torch allows only one definition."""
if not _IS_DEFINED:
    _library.define(
        "linear_map(Tensor x, str kind, str group, int place, int size, int[] numbers, "
        "SymInt[]? first, SymInt[]? second) -> Tensor"
    )


def is_traced() -> bool:
    """Return whether dynamo or torch.export traces the caller, which then must not communicate or
    read values."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def name_of(group: Group) -> str:
    """Return the name under which a graph, and torch, finds the group again."""
    return group.group_name


def linear_map(
    x: Tensor,
    kind: str,
    group: Group,
    numbers: Sequence[int],
    first: Sizes | None,
    second: Sizes | None,
) -> Tensor:
    """Call the operator: the map of this kind, with these numbers and lengths, over a group.

    Its arguments include this rank's index, although the group knows it. The compiled graph depends
    on the index, and torch's caches of compiled graphs identify a graph by its operators and their
    arguments. Otherwise ranks that share such a cache would run each other's graphs, with slices at
    the other's offset.
    """
    call = torch.ops.torchdistpackage.linear_map
    return call(
        x,
        kind,
        name_of(group),
        group.rank(),
        group.size(),
        list(numbers),
        _listed(first),
        _listed(second),
    )


def define_linear_map(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make `run(x, kind, group, numbers, first, second)` the operator's kernel, with its autograd.

    autograd.py calls this, because it defines the maps.
    """

    def kernel(x, kind, group, index, size, numbers, first, second):
        return run(x, kind, _resolve_process_group(group), tuple(numbers), first, second)

    if not _IS_DEFINED:
        _library.impl("linear_map", kernel, "Autograd")
        _library.impl("linear_map", kernel, "CompositeExplicitAutograd")  # under inference_mode
    return run


def _listed(sizes: Sizes | None) -> list[int] | None:
    """Return sizes as a list, or None."""
    return None if sizes is None else list(sizes)


# -- like those of primitives.py, along dim 0, but never in place ------------------------------


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Return the reduction of x over the group. op: sum, max or min."""
    if group.size() == 1:
        return x
    wire = _calls.wait_tensor(_calls.all_reduce(as_added(x), op, name_of(group)))
    return from_added(wire, x.dtype)


def all_gather(x: Tensor, group: Group, sizes: Sizes | None = None) -> Tensor:
    """Gather (n, ...) on each rank to (sum of all n, ...), in group order."""
    size = group.size()
    if size == 1:
        return x
    wire = to_bytes(x)
    longest = wire.shape[0] if sizes is None else max(sizes)
    # every back end gathers equal lengths, so pad shorter ones
    wire = _calls.all_gather_into_tensor(_filled(wire, longest), size, name_of(group))
    wire = _calls.wait_tensor(wire)
    if sizes is not None:
        parts = wire.view(size, longest, *wire.shape[1:]).unbind(0)
        wire = torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])
    return _from_bytes(wire, x.dtype)


def reduce_scatter(x: Tensor, group: Group, sizes: Sizes | None = None) -> Tensor:
    """Reduce (sum of all n, ...) to this rank's (n, ...) of the sum over the group."""
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
    """Send slice i of (sum of all n, ...) to rank i of the group; return the slices received."""
    size = group.size()
    if size == 1:
        return x
    sent = send_sizes or [x.shape[0] // size] * size
    received = receive_sizes or sent
    wire = _calls.all_to_all_single(to_bytes(x), list(received), list(sent), name_of(group))
    return _from_bytes(_calls.wait_tensor(wire), x.dtype)


def broadcast(x: Tensor, group: Group, source: int) -> Tensor:
    """Return the tensor of global rank `source`, on every rank."""
    if group.size() == 1:
        return x
    source_index = dist.get_group_rank(group, source)
    wire = _calls.wait_tensor(_calls.broadcast(to_bytes(x), source_index, name_of(group)))
    return _from_bytes(wire, x.dtype)


def _filled(rows: Tensor, num: int) -> Tensor:
    """Return the rows padded with zeros to `num`."""
    missing = num - rows.shape[0]
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows


def _from_bytes(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Return received rows in their original dtype."""
    return wire if wire.dtype == dtype else wire.view(dtype).squeeze(-1)
