"""In-place reduce-scatter and all-gather of one flat tensor, of which each rank owns a slice.

Elements are added in group order, so the cut of a tensor changes no number. On gloo both consist of
messages (pairwise.py), and `wait()` adds the arrived values.

A slice whose receiver is ready leaves at once, also while this process computes. Else it waits for
a notice that queues behind the receiver's own sends. So a caller that knows its next call posts the
receives with a `prepost_` function, before the sends of the calls ahead. Where nothing is posted
ahead (`posts_ahead`), that function sends nothing and allocates nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.backends import require_host_memory
from torchdistpackage.comm.dtypes import as_added, to_bytes
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.comm.groups import reverse_group
from torchdistpackage.comm.primitives import gather_into, scatter_into
from torchdistpackage.comm.transport.pairwise import (
    EXPECTED_GATHERED,
    EXPECTED_SUMMED,
    expected_tag,
    post_receives,
    post_sends,
)
from torchdistpackage.comm.work import Work, run_async
from torchdistpackage.errors import CommError

Group = dist.ProcessGroup


def start_reduce_scatter_v(
    flat: Tensor, bounds: Sequence[int], group: Group, *, wire_dtype: torch.dtype | None = None
) -> Work:
    """Begin to sum `flat` (n,) over the group: rank i gets elements bounds[i] to bounds[i + 1].

    After `wait()` this rank's slice holds its sum, and the slices of others are undefined. Until
    then leave `flat` alone and keep its memory.

    bounds: one more than the group has ranks, ascending; slices may be uneven or empty.
    wire_dtype: the float dtype in which parts travel; sums are made in flat's own, narrow ones in
        float32 (NCCL adds what travels in flat's own dtype in that).

    Raises:
        CommError: flat, bounds or wire_dtype do not fit, or the backend failed.
    """
    return prepost_reduce_scatter_v(flat, bounds, group, wire_dtype=wire_dtype)()


def start_all_gather_v(
    flat: Tensor, bounds: Sequence[int], group: Group, *, wire_dtype: torch.dtype | None = None
) -> Work:
    """Begin to fill `flat` (n,), of which rank i has elements bounds[i] to bounds[i + 1].

    Until `wait()` returns, leave `flat` alone and keep its memory.

    wire_dtype: the float dtype in which slices travel; `wait()` rounds this rank's own slice to it
        too, so that all ranks end with equal numbers.

    Raises:
        CommError: flat, bounds or wire_dtype do not fit, or the backend failed.
    """
    return prepost_all_gather_v(flat, bounds, group, wire_dtype=wire_dtype)()


def prepost_reduce_scatter_v(
    flat: Tensor, bounds: Sequence[int], group: Group, *, wire_dtype: torch.dtype | None = None
) -> Callable[[], Work]:
    """Post the receives of `start_reduce_scatter_v`; calling the result once starts it.

    The start begins to read and write `flat`. All ranks make these calls in one order, and start
    them in one order; a call that one rank does not start, all must drop.
    """
    if group.size() == 1:
        return partial(Work, flat)
    cut = _FlatShards("sum", flat, as_added(flat), bounds, group, wire_dtype)
    local, parts = cut.mine, cut.parts
    if posts_ahead(group):
        buffers = [
            part[:0] if part is local else torch.empty_like(local, dtype=cut.wire_dtype)
            for part in parts
        ]
        tag = expected_tag(EXPECTED_SUMMED, group)
        works = post_receives(buffers, group, tag, cut.down)
        sent = lambda: [part if part is local else part.to(cut.wire_dtype) for part in parts]  # noqa: E731
        finish = partial(cut.add, buffers)
        return partial(cut.start, "reduce_scatter", finish, _post, works, sent, cut.down, tag)
    if cut.wire_dtype is local.dtype:
        into = (scatter_into, local, cut.full) if cut.even else (dist.reduce_scatter, local, parts)
        return partial(cut.start, "reduce_scatter", None, *into)
    return partial(_start_by_all_to_all, cut)


def prepost_all_gather_v(
    flat: Tensor,
    bounds: Sequence[int],
    group: Group,
    *,
    wire_dtype: torch.dtype | None = None,
    own_shard: Tensor | None = None,
) -> Callable[[], Work]:
    """Post the receives of `start_all_gather_v`; calling the result once starts it.

    From here on other ranks' elements of `flat` may be overwritten, so keep its memory. All ranks
    make these calls in one order, and start them in one order; a call that one rank does not start,
    all must drop.

    own_shard: this rank's elements, if `flat` does not hold them yet; perhaps in another float
        dtype. After `wait()` they are in `flat` too.
    """
    if group.size() == 1:
        return partial(Work, flat) if own_shard is None else partial(_set, flat, bounds, own_shard)
    cut = _FlatShards("gather", flat, to_bytes(flat), bounds, group, wire_dtype)

    def issue(full: Tensor, parts: list[Tensor], *, group: Group, async_op: bool) -> dist.Work:
        call, out = (gather_into, full) if cut.even else (dist.all_gather, parts)
        return call(out, cut.rounded(parts, own_shard), group=group, async_op=async_op)

    def start() -> Work:
        full, parts, finish = cut.buffers()
        return cut.start("all_gather", finish, issue, full, parts)

    if not posts_ahead(group):
        return start
    _, parts, finish = cut.buffers()
    tag = expected_tag(EXPECTED_GATHERED, group)
    works = post_receives(parts, group, tag, cut.down)
    sent = lambda: [cut.rounded(parts, own_shard)] * len(parts)  # noqa: E731
    return partial(cut.start, "all_gather", finish, _post, works, sent, cut.down, tag)


def posts_ahead(group: Group) -> bool:
    """Return True if the `prepost_` functions post receives, for which the memory must already
    exist.
    """
    return group.size() > 1 and state_of(group).direct


class _Rounded(NamedTuple):
    """The shape and dtype of a flat tensor in transit, for the flight recorder and the debug
    mode.
    """

    shape: torch.Size
    dtype: torch.dtype


class _FlatShards:
    """A flat tensor cut by rank, and its dtype in transit.

    Raises:
        CommError: they do not fit.
    """

    def __init__(
        self,
        action: Literal["sum", "gather"],
        flat: Tensor,
        body: Tensor,
        bounds: Sequence[int],
        group: Group,
        wire_dtype: torch.dtype | None,
    ):
        lengths = [stop - start for start, stop in pairwise(bounds)]
        if len(lengths) != group.size() or min(lengths) < 0 or bounds[0] < 0:
            raise CommError(
                f"bounds {list(bounds)} must be {group.size() + 1} ascending indices: where the "
                f"slice of each of the {group.size()} ranks begins, and the end of the last"
            )
        if flat.dim() != 1 or bounds[-1] > len(flat) or body.data_ptr() != flat.data_ptr():
            raise CommError(
                f"cannot {action} slices up to element {bounds[-1]} in place in a tensor of shape "
                f"{tuple(flat.shape)}, stride {flat.stride()} and dtype {dtype_name(flat.dtype)}; "
                "pass a contiguous one-dimensional tensor of at least that length, with floats "
                "or int64"
            )
        if state_of(group).direct:
            require_host_memory(action, group, flat)
        if wire_dtype is not None and not (
            wire_dtype.is_floating_point and flat.is_floating_point()
        ):
            raise CommError(
                f"{dtype_name(flat.dtype)} cannot be rounded to {dtype_name(wire_dtype)} for the "
                f"wire; only floats can, to floats, so leave wire_dtype out"
            )
        self.flat, self.group, self.lengths = flat, group, lengths
        self.even = len({*lengths}) == 1
        self.full = body[bounds[0] : bounds[-1]]
        self.parts = list(self.full.split(lengths))
        self.index = group.rank()
        # read once, so that sends and receives use the same: a group may be created in between
        self.down = reverse_group(group)
        self.mine = self.parts[self.index]
        self.wire_dtype = wire_dtype or body.dtype
        # the record and the debug mode's comparison must name the dtype that travels
        is_rounded = self.wire_dtype is not body.dtype
        self.noted = _Rounded(flat.shape, self.wire_dtype) if is_rounded else flat

    def start(self, operation: str, finish: Callable[[], Tensor] | None, function, *args) -> Work:
        """Issue the call with the lengths of all slices, which the debug mode compares."""
        facts = ("rows of each rank", *self.lengths)
        return run_async(operation, self.group, self.noted, facts, finish, function, *args)

    def buffers(self) -> tuple[Tensor, list[Tensor], Callable[[], Tensor] | None]:
        """Return where a gather arrives, as one tensor and in slices, and the function that copies
        it to `flat`.
        """
        if self.wire_dtype is self.mine.dtype:
            return self.full, self.parts, None
        full = torch.empty_like(self.full, dtype=self.wire_dtype)
        return full, list(full.split(self.lengths)), partial(self.write, full)

    @torch.no_grad()
    def add(self, buffers: Sequence[Tensor]) -> Tensor:
        """Add this rank's slice and those in the buffers, in group order."""
        local, index = self.mine, self.index
        # sums of halves are made in float32: each addition would round
        narrow = local.is_floating_point() and local.itemsize < 4
        total = local.float() if narrow else local
        if index:  # the parts of lower ranks come first in group order
            first_buffer = buffers[0]
            for buffer in buffers[1:index]:
                first_buffer = first_buffer.to(total.dtype).add_(buffer)
            total += first_buffer
        for buffer in buffers[index + 1 :]:
            total += buffer
        if narrow:
            local.copy_(total)
        return self.flat

    def rounded(self, parts: list[Tensor], local: Tensor | None) -> Tensor:
        """Return this rank's slice in its transit dtype, at the place where a gather puts it."""
        source, part = self.mine if local is None else local, parts[self.index]
        return part if part is source else part.copy_(source)

    @torch.no_grad()
    def write(self, arrived: Tensor) -> Tensor:
        """Copy data that arrived in another dtype into `flat`."""
        self.full.copy_(arrived)
        return self.flat


def _post(
    works: list[dist.Work],
    sent: Callable[[], list[Tensor]],
    down: Group | None,
    tag: int,
    *,
    group: Group,
    async_op: bool,
) -> list[dist.Work]:
    """Send each rank its slice of `sent`, whose receive is posted. `works` are this rank's own
    receives.
    """
    return works + post_sends(sent(), group, tag, down)


@torch.no_grad()
def _set(flat: Tensor, bounds: Sequence[int], local: Tensor) -> Work:
    """Put this rank's elements into `flat`, for a group of one."""
    flat[bounds[0] : bounds[1]] = local
    return Work(flat)


def _start_by_all_to_all(cut: _FlatShards) -> Work:
    """Start a reduction over NCCL whose slices are narrower than `flat`; NCCL would add in their
    dtype.
    """
    num, length = len(cut.parts), len(cut.mine)
    buffer = cut.mine.new_empty((num * length,), dtype=cut.wire_dtype)
    finish = partial(cut.add, buffer.view(num, length).unbind())
    splits = [length] * num, cut.lengths
    sent = cut.full.to(cut.wire_dtype)
    return cut.start("reduce_scatter", finish, dist.all_to_all_single, buffer, sent, *splits)
