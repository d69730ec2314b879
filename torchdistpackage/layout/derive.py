"""Functions that derive from layouts what one rank does: slices, owner, gradient sums, groups.

No torch.

A dim with extent n over axes of sizes a, b is cut into a chunks, each into b, so the
first named axis is the outer one. All functions are arithmetic on (layout, mesh, rank).

A range [start, stop) of a flattened shard, which is what a ZeRO slice holds, is a few contiguous
boxes of the global tensor, at most two for each dim.

Only its members create a group, and each member waits until all have come. So all ranks create
groups in one order: the world, the axes in mesh order, then lists of ranks in ascending order. A
rank that waits for a member waits for one that is still at an earlier group. Nothing is earlier
than the first group, so ranks cannot wait in a circle, whatever other groups each rank is in.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.layout import Axes, HeadSplit, Layout, Ranges
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.topology.mesh import Mesh, Topology

BATCH_AXES = ("data", "context", "expert_data")
"""Axes whose ranks see different tokens, so gradients of shared parameters are summed over them."""

Block = tuple[tuple[slice, ...], tuple[slice, ...]]
"""Slices of the global tensor and slices of the local one that hold the same elements."""


def local_slices(layout: Layout, mesh: Mesh, rank: int) -> tuple[tuple[slice, ...], ...]:
    """Return, for each dim, the global ranges that `rank` holds, in local order.

    A dim has one range, or one for each part if it is fused. For shape (Dout, Din) and split
    (("tensor",), ()) on tensor=4, rank 1 gets ((Dout/4 : Dout/2,), (0 : Din,)).

    Raises:
        LayoutError: a dim or part is not a multiple of the ranks that share it, and the
            layout is not `uneven`; or its `ranges` are for another number of ranks.
    """
    coord = mesh.coord(rank)
    result: list[tuple[slice, ...]] = []
    for dim, axes in enumerate(layout.split):
        if layout.ranges and axes:
            result.append(tuple(slice(*each) for each in layout.ranges[_index(layout, mesh, rank)]))
            continue
        parts = layout.parts[dim] or (layout.shape[dim],)
        starts = itertools.accumulate(parts, initial=0)
        ranges: list[slice] = []
        for start, length in zip(starts, parts, strict=False):
            if layout.heads is not None and axes:
                index = coord.get(axes[0], 0)
                first, num = layout.heads.head_range(mesh.axis_size(*axes), index)
                width = length // (layout.heads.groups * layout.heads.members)
                ranges.append(slice(start + first * width, start + (first + num) * width))
                continue
            _check_even(layout, mesh, dim, length)
            for axis in axes:
                offset, length = even_share(length, mesh.axis_size(axis), coord.get(axis, 0))
                start += offset
            ranges.append(slice(start, start + length))
        result.append(tuple(ranges))
    return tuple(result)


def even_share(extent: int, num_ranks: int, index: int) -> tuple[int, int]:
    """Return (offset, length) of one of `even_sizes(extent, num_ranks)`, the rule for all cuts."""
    sizes = even_sizes(extent, num_ranks)
    return sum(sizes[:index]), sizes[index]


def holders_along(layout: Layout, num_ranks: int, index: int) -> range:
    """Return the indices along the splitting axis that hold the same elements as `index`."""
    if layout.heads is None or not layout.is_shared:
        return range(index, index + 1)
    return layout.heads.sharing_indices(num_ranks, index)


def local_shape(layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Return the shape of the shard of `rank`."""
    return tuple(sum(s.stop - s.start for s in dim) for dim in local_slices(layout, mesh, rank))


def blocks(layout: Layout, mesh: Mesh, rank: int, once: bool = False) -> tuple[Block, ...]:
    """Return the shard of `rank` as boxes, each with its slices of the global and the local tensor.

    once: leave out `ranges` that another index owns, so that over all indices each element is in
        exactly one box.
    """
    dims: list[list[tuple[slice, slice]]] = []
    for dim, ranges in enumerate(local_slices(layout, mesh, rank)):
        starts = itertools.accumulate((r.stop - r.start for r in ranges), initial=0)
        boxes = [
            (r, slice(start, start + r.stop - r.start))
            for r, start in zip(ranges, starts, strict=False)
        ]
        if once and layout.ranges and layout.split[dim]:
            boxes = [boxes[i] for i in _spoken(layout, _index(layout, mesh, rank))]
        # a range that begins past the end of the dim is padding, which only this rank has
        dims.append([(r, at) for r, at in boxes if r.start < min(r.stop, layout.shape[dim])])
    return tuple(
        (tuple(g for g, _ in box), tuple(at for _, at in box)) for box in itertools.product(*dims)
    )


def spoken_slices(layout: Layout, index: int) -> tuple[slice, ...]:
    """Return the slices of the local dim that hold the `ranges` which `index` owns."""
    lengths = (stop - start for start, stop in layout.ranges[index])
    ends = tuple(itertools.accumulate(lengths, initial=0))
    return tuple(slice(ends[i], ends[i + 1]) for i in _spoken(layout, index))


def _spoken(layout: Layout, index: int) -> tuple[int, ...]:
    """Return which `ranges` of `index` hold their elements first: not held by an earlier index and
    not repeated.
    """
    earlier = {each for ranges in layout.ranges[:index] for each in ranges}
    own_ranges = layout.ranges[index]
    return tuple(
        i
        for i, own_range in enumerate(own_ranges)
        if own_range not in earlier and own_range not in own_ranges[:i]
    )


def _index(layout: Layout, mesh: Mesh, rank: int) -> int:
    """Return the index of `rank` along the axis that `layout.ranges` divides."""
    (axis,) = layout.split_axes
    if mesh.axis_size(axis) != len(layout.ranges):
        raise LayoutError(
            f"{layout.name} is dealt to {len(layout.ranges)} ranks, but {axis} has "
            f"{mesh.axis_size(axis)}; use a topology with {axis} {len(layout.ranges)}"
        )
    return mesh.coord(rank).get(axis, 0)


def replicated_axes(layout: Layout, mesh: Mesh) -> Axes:
    """Return the axes along which every rank holds the same elements, in mesh order.

    A parameter with `stages` is not replicated along pipe; one without is.
    """
    cutting = {*layout.split_axes, *(("pipe",) if layout.stages else ())}
    return tuple(name for name in mesh.names if name not in cutting)


def owns(layout: Layout, mesh: Mesh, rank: int, among: Axes | None = None) -> bool:
    """Return whether `rank` owns its shard; each element has one owner over all ranks and stages.

    The owner is first along every replicated axis and on the first stage that holds it. among:
    consider only these axes; each group along them then has an owner of its own.
    """
    coord = mesh.coord(rank)
    if layout.stages and coord.get("pipe", 0) != layout.stages[0]:
        return False
    # `replicated_axes` leaves out the axis that splits a shared head, yet some of its ranks hold
    # the same elements
    if layout.is_shared and (among is None or layout.split_axes[0] in among):
        axis = layout.split_axes[0]
        if coord.get(axis, 0) != _holders_in(layout, mesh, coord).start:
            return False
    axes = replicated_axes(layout, mesh)
    return all(coord[axis] == 0 for axis in axes if among is None or axis in among)


def owner(layout: Layout, mesh: Mesh, rank: int) -> int:
    """Return the owner of the shard of `rank`: the only holder for which `owns` is true."""
    coord = mesh.coord(rank) | dict.fromkeys(replicated_axes(layout, mesh), 0)
    if layout.is_shared:
        coord[layout.split_axes[0]] = _holders_in(layout, mesh, coord).start
    return mesh.rank(coord | ({"pipe": layout.stages[0]} if layout.stages else {}))


def gradient_axes(layout: Layout, mesh: Mesh) -> Axes:
    """Return the axes over which the gradient is summed: its ranks see different tokens or hold
    partial sums.
    """
    replicated = replicated_axes(layout, mesh)
    return tuple(
        name
        for name in mesh.names
        if name in layout.unreduced or (name in replicated and name in BATCH_AXES)
    )


def num_replicas(layout: Layout, mesh: Mesh) -> int:
    """Return the number of batches over which a mean gradient is taken."""
    axes = [a for a in gradient_axes(layout, mesh) if a in BATCH_AXES]
    return mesh.axis_size(*axes, *(a for a in layout.split_axes if a == "expert"))


def placements(layout: Layout, axes: Iterable[str]) -> tuple[int | None, ...]:
    """Return, for each axis in mesh order, the dim it shards, or None where it replicates.

    This is DTensor's placement list: Shard(dim) or Replicate().
    """
    by_axis = {axis: dim for dim, split in enumerate(layout.split) for axis in split}
    return tuple(by_axis.get(axis) for axis in axes)


def num_elements(layout: Layout, mesh: Mesh, rank: int) -> int:
    """Return the ranks that hold the shard of `rank`."""
    if not layout.split_axes:
        return math.prod(layout.shape)
    x = layout
    try:
        return _num_elements(x.shape, x.split, x.parts, x.uneven, x.heads, x.ranges, mesh, rank)
    except LayoutError:
        return math.prod(local_shape(layout, mesh, rank))  # whose message has the name


@lru_cache(maxsize=4096)
def _num_elements(
    shape: tuple[int, ...],
    split: tuple[Axes, ...],
    parts: tuple[tuple[int, ...], ...],
    uneven: bool,
    heads: HeadSplit | None,
    ranges: tuple[Ranges, ...],
    mesh: Mesh,
    rank: int,
) -> int:
    """Count once for all blocks of a model."""
    layout = Layout("", shape, split, parts=parts, uneven=uneven, heads=heads, ranges=ranges)
    return math.prod(local_shape(layout, mesh, rank))


def _check_even(layout: Layout, mesh: Mesh, dim: int, length: int) -> None:
    """Refuse a dim that its ranks cannot share evenly, unless the layout allows it."""
    sharing = mesh.axis_size(*layout.split[dim])
    if length % sharing and not layout.uneven:
        raise LayoutError(
            f"{layout.name}: dim {dim} has {length} elements, which {sharing} ranks "
            f"({' x '.join(layout.split[dim])}) cannot share evenly; use a multiple of {sharing}"
        )


def gradient_ranks(layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Return the ranks whose gradients are summed for the shard of `rank`, ascending, `rank`
    included.

    They lie along the gradient axes. For a tied parameter they include the same ranks of every
    stage that holds it.
    """
    return _holders(layout, mesh, rank, gradient_axes(layout, mesh))


def sharding_ranks(
    summed: tuple[int, ...], dense: Mesh, rank: int, num_data: int | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that shard a sum over the ranks `summed`, and the ranks with the same shard.

    num_data: number of neighbours along the data axis that shard; the others replicate, as in HSDP.
    None: all of `summed` shard.

    Raises:
        LayoutError: not every shard is on equally many ranks.
    """
    return (summed, (rank,)) if num_data is None else _in_blocks(summed, dense, rank, num_data)


@lru_cache(maxsize=256)
def _in_blocks(
    summed: tuple[int, ...], dense: Mesh, rank: int, num_data: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    size, blocks = dense.axis_size("data"), _blocks_of(summed, dense, num_data)
    own_block = next(ranks for ranks in blocks if rank in ranks)
    if len({len(ranks) for ranks in blocks}) > 1:
        raise LayoutError(
            f"{num_data} neighbours of the {size} data ranks do not cut ranks {summed} into equal "
            f"groups; use a divisor of {size}, and with experts a multiple or a divisor of the "
            f"ranks that share them"
        )
    position = own_block.index(rank)
    return own_block, tuple(sorted(ranks[position] for ranks in blocks))


def _blocks_of(ranks: Iterable[int], dense: Mesh, num_data: int) -> list[tuple[int, ...]]:
    """Return `ranks` cut into blocks of `num_data` neighbours along the data axis."""
    names, size = dense.names, dense.axis_size("data")
    inner = names[names.index("data") + 1 :] if "data" in names else names
    stride = dense.axis_size(*inner)
    blocks: dict[int, list[int]] = {}
    for rank in ranks:
        blocks.setdefault(rank // stride % size // num_data, []).append(rank)
    return [tuple(block) for block in blocks.values()]


def data_ranks_of_node(topology: Topology, ranks_per_node: int) -> int:
    """Return the largest number of adjacent data ranks whose shards of a sum stay on one node.

    0 if even the sum of one data rank, over its context ranks, crosses nodes.
    """
    dense, expert = topology.dense, topology.expert.axis_size("expert")
    size = dense.axis_size("data")
    for number in range(size, 0, -1):
        if size % number or (number % expert and expert % number):
            continue
        blocks = (
            block
            for group in dense.groups(BATCH_AXES)
            for block in _blocks_of(group, dense, number)
        )
        if all(ranks[0] // ranks_per_node == ranks[-1] // ranks_per_node for ranks in blocks):
            return number
    return 0


def replica_ranks(layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Return the ranks that hold the same elements as `rank`, ascending, `rank` included."""
    return _holders(layout, mesh, rank, replicated_axes(layout, mesh))


def _holders(layout: Layout, mesh: Mesh, rank: int, axes: Axes) -> tuple[int, ...]:
    """Return the ranks along `axes`, in every stage that holds the parameter, and those that share
    its heads.
    """
    coord = mesh.coord(rank)
    coords = [coord]
    if layout.is_shared:
        axis = layout.split_axes[0]
        coords = [coord | {axis: index} for index in _holders_in(layout, mesh, coord)]
    if len(layout.stages) > 1:
        coords = [coord | {"pipe": stage} for coord in coords for stage in layout.stages]
    if coords == [coord]:  # ascending already, and thousands of ranks where data is long
        return _group(mesh, rank, axes)
    return tuple(sorted({r for coord in coords for r in mesh.group(mesh.rank(coord), axes)}))


@lru_cache(maxsize=64)
def _group(mesh: Mesh, rank: int, axes: Axes) -> tuple[int, ...]:
    """Return a group as a tuple, the same object for all parameters."""
    return tuple(mesh.group(rank, axes))


def _holders_in(layout: Layout, mesh: Mesh, coord: dict[str, int]) -> range:
    """Return the indices along the splitting axis that share heads with the rank at `coord`."""
    axis = layout.split_axes[0]
    return holders_along(layout, mesh.axis_size(axis), coord.get(axis, 0))


PIPE = "pipe"
"""The axis whose neighbours send each other messages."""
MODEL = "model"
"""Group with few calls; it connects in its first call, which is a collective of its ranks."""


@dataclass(frozen=True, slots=True)
class Creation:
    """A group to create.

    connects: its ranks connect now, not in its first call.
    neighbours: adjacent ranks of its ring also connect for point-to-point messages.
    axes: axes that the group lies along, whose options it has.
    """

    ranks: tuple[int, ...]
    connects: bool = True
    neighbours: bool = False
    axes: tuple[str, ...] = field(default=(), compare=False)


def creations(
    topology: Topology,
    rank: int,
    *,
    sums: Iterable[Layout] = (),
    copies: Iterable[Layout] = (),
    num_data: int | None = None,
) -> tuple[Creation, ...]:
    """Return all groups of `rank` in the order of their creation, each list of ranks once.

    sums: layouts of parameters of this rank whose gradients are summed. With any of them, the
        ranks that see different tokens get a group too.
    num_data: neighbours along the data axis that shard each sum (`sharding_ranks`), whose groups
        and replicas are then created instead of the group of the sum.
    copies: layouts of parameters whose replicas are compared.

    The groups of the axes come first, and are the only ones without layouts.
    """
    planned = [Creation(tuple(range(topology.world_size)))]
    moe = topology.expert.axis_size("expert") > 1
    for mode in (*topology.dense.names, MODEL, *(("moe_dp", "moe_ep") if moe else ())):
        ranks = tuple(topology.group(rank, mode))
        axes = () if mode == MODEL else topology.named(mode)[1]
        planned.append(Creation(ranks, connects=mode != MODEL, neighbours=mode == PIPE, axes=axes))
    summed = {gradient_ranks(x, topology.view(x.view), rank) for x in sums}
    batch = tuple(topology.dense.group(rank, BATCH_AXES))
    if num_data is not None:
        pairs = (sharding_ranks(x, topology.dense, rank, num_data) for x in {*summed, batch})
        summed = {ranks for pair in pairs for ranks in pair} if summed else summed
    if summed:
        summed.add(batch)
    same = {replica_ranks(x, topology.view(x.view), rank) for x in copies}
    planned += (Creation(ranks, axes=("data",)) for ranks in sorted(summed))
    planned += (Creation(ranks) for ranks in sorted(same))
    merged: dict[tuple[int, ...], Creation] = {}
    for creation in planned:
        previous = merged.get(creation.ranks, Creation(creation.ranks, connects=False))
        merged[creation.ranks] = Creation(
            creation.ranks,
            previous.connects or creation.connects,
            previous.neighbours or creation.neighbours,
            (*previous.axes, *creation.axes),
        )
    return tuple(merged.values())


Shape = tuple[int, ...]
Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """A box [offset, offset + lengths) of a tensor, contiguous from `start` once it is
    flattened.
    """

    start: int
    offset: Shape
    lengths: Shape

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.lengths)


@dataclass(frozen=True, slots=True)
class Part:
    """The same elements in the global tensor (`where`) and in a contiguous run of memory
    (`inside`).

    `run` and `inside` have their dims in memory order, `where` in the tensor's own order.
    """

    where: Box
    run: FlatSlice
    inside: Box


def runs(shape: Shape, start: int, stop: int) -> tuple[FlatSlice, ...]:
    """Return boxes that tile elements [start, stop) of a tensor of `shape`, in ascending order.

    For shape (4, 6), [4, 16) is [0, 4:6], [1:2, 0:6] and [2, 0:4].
    """
    if stop <= start:
        return ()
    if not shape:
        return (FlatSlice(start, (), ()),)
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _in_row(shape, first, head, tail)
    boxes = _in_row(shape, first, head, row) if head else ()
    first += head > 0
    if first < last:
        others = (0,) * (len(shape) - 1)
        boxes += (FlatSlice(first * row, (first, *others), (last - first, *shape[1:])),)
    return boxes + _in_row(shape, last, 0, tail)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> tuple[FlatSlice, ...]:
    base = row * math.prod(shape[1:])
    return tuple(
        FlatSlice(base + run.start, (row, *run.offset), (1, *run.lengths))
        for run in runs(shape[1:], start, stop)
    )


def parts(
    layout: Layout,
    mesh: Mesh,
    rank: int,
    start: int,
    stop: int,
    order: Sequence[int] | None = None,
    once: bool = False,
) -> tuple[Part, ...]:
    """Return the positions in the global tensor of elements [start, stop) of `rank`'s flattened
    shard.

    A run has several parts if a dim is fused, because its ranges lie apart.

    order: dims of the shard from slowest to fastest varying in memory; default: ascending. once: as
    in `blocks`.
    """
    shape = local_shape(layout, mesh, rank)
    order = range(len(shape)) if order is None else order
    result: list[Part] = []
    boxes = blocks(layout, mesh, rank, once)
    for run in runs(tuple(shape[dim] for dim in order), start, stop):
        run_box = tuple(slice(o, o + n) for o, n in zip(run.offset, run.lengths, strict=True))
        for where, local in boxes:
            common = overlap(run_box, tuple(local[dim] for dim in order))
            if common is not None:
                at = list(where)
                for dim, c in zip(order, common, strict=True):
                    at[dim] = shifted(c, where[dim].start - local[dim].start)
                inside = tuple(shifted(c, -o) for c, o in zip(common, run.offset, strict=True))
                result.append(Part(tuple(at), run, inside))
    return tuple(result)


def overlap(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes of one tensor, or None if it is empty."""
    common = tuple(
        slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True)
    )
    return None if any(s.stop <= s.start for s in common) else common


def shifted(range_: slice, by: int) -> slice:
    """Return the slice moved by `by` elements."""
    return slice(range_.start + by, range_.stop + by)
