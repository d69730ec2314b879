"""The split of one parameter over ranks, as plain data separate from the model.

A layout names dims of the global tensor and mesh axes, never ranks or groups. `layout/derive.py`
derives slices, owners, gradient sums and placements from it. Initial weights, gradient reduction,
norms and checkpoints all read this one value.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.topology.mesh import View

Axes = tuple[str, ...]
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """The split of a dim of attention heads: between heads, never through one.

    The dim, or each of its parts, is `groups` times `members` heads of equal width. A group is one
    key-value head with its `members` query heads; keys and values have one member. Each rank gets
    whole groups, as evenly as possible. If there are more ranks than groups, each group gets its
    own ranks, which divide its members among them.

    shared: the ranks of a group each hold all of its members, and a partial sum of their gradient.
    """

    groups: int
    members: int = 1
    shared: bool = False

    def head_range(self, num_ranks: int, index: int) -> tuple[int, int]:
        """Return (first head, number of heads) of the rank at `index` of `num_ranks`."""
        if num_ranks <= self.groups:
            sizes = even_sizes(self.groups, num_ranks)
            return sum(sizes[:index]) * self.members, sizes[index] * self.members
        sharing = self.sharing_indices(num_ranks, index)
        first = self._group_of(num_ranks, index) * self.members
        if self.shared:
            return first, self.members
        sizes = even_sizes(self.members, len(sharing))
        position = index - sharing.start
        return first + sum(sizes[:position]), sizes[position]

    def sharing_indices(self, num_ranks: int, index: int) -> range:
        """Return the indices of the ranks that share the group of heads of `index`."""
        if num_ranks <= self.groups:
            return range(index, index + 1)
        sizes, group = even_sizes(num_ranks, self.groups), self._group_of(num_ranks, index)
        return range(sum(sizes[:group]), sum(sizes[: group + 1]))

    def _group_of(self, num_ranks: int, index: int) -> int:
        """Return the group of heads that the rank at `index` works on, if ranks outnumber
        groups.
        """
        ends = accumulate(even_sizes(num_ranks, self.groups))
        return next(group for group, end in enumerate(ends) if index < end)


@dataclass(frozen=True, slots=True)
class Layout:
    """The split of one parameter over the mesh.

    name: global name, the same under every layout; tied parameters share one.
    shape: of the full tensor.
    split: for each dim the mesh axes that cut it, outermost first.
    unreduced: axes over which each rank's gradient is a partial sum (a norm under
        sequence parallelism sees only its rows).
    view: the mesh that `split` and `unreduced` speak of.
    stages: indices along `pipe` of the ranks that hold it, ascending. Several mean that it is
        tied; none that it is outside the pipeline and every rank holds it.
    parts: for each dim the sizes of fused parts (q, k, v) that are cut one by one, or ().
    uneven: the length need not divide; the first ranks then hold one element more, as
        `even_sizes` says.
    heads: the heads that the split dim consists of, if any; one axis splits it then.
    ranges: for each index along the one splitting axis, the (start, stop) ranges of the dim that
        it holds, in order, for cuts that follow no rule. Two ranges are equal or disjoint; the
        first index that holds a range owns it. A range past the end is padding: zeros that stay
        zero.
    is_table: its rows stand for token ids, positions or classes: an embedding, an output head, or
        both tied. Matrix optimizers such as Muon leave it to AdamW.

    Raises:
        LayoutError: split, parts, heads or ranges do not fit the shape.
    """

    name: str
    shape: tuple[int, ...]
    split: tuple[Axes, ...] = ()
    unreduced: Axes = ()
    view: View = "dense"
    stages: tuple[int, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()
    uneven: bool = False
    heads: HeadSplit | None = None
    ranges: tuple[Ranges, ...] = ()
    is_table: bool = False

    @property
    def is_matrix(self) -> bool:
        """Whether matrix optimizers take it: a matrix, or a stack of experts' matrices, that is no
        table.
        """
        return len(self.shape) == 2 + (self.view == "expert") and not self.is_table

    def __post_init__(self) -> None:
        for field, empty in (("split", ()), ("parts", ())):
            if not getattr(self, field):
                object.__setattr__(self, field, (empty,) * len(self.shape))
        if len(self.split) != len(self.shape) or len(self.parts) != len(self.shape):
            raise LayoutError(
                f"{self.name}: shape {self.shape} has {len(self.shape)} dims, but split names "
                f"{len(self.split)} and parts {len(self.parts)}; give one entry a dim"
            )
        axes = [axis for dim in self.split for axis in dim]
        if len(set(axes)) != len(axes):
            raise LayoutError(f"{self.name}: split {self.split} uses an axis twice; use each once")
        for dim, (extent, parts) in enumerate(zip(self.shape, self.parts, strict=True)):
            if parts and sum(parts) != extent:
                raise LayoutError(
                    f"{self.name}: dim {dim} has {extent} elements, but its parts {parts} sum to "
                    f"{sum(parts)}; make the parts add up to the dim"
                )
            if self.heads is not None and self.split[dim]:
                self._check_heads(dim, self.heads)
            if self.ranges and self.split[dim]:
                self._check_ranges(extent)

    def _check_heads(self, dim: int, heads: HeadSplit) -> None:
        """Refuse a dim whose parts are not whole heads, or that several axes split."""
        num, parts = heads.groups * heads.members, self.parts[dim] or (self.shape[dim],)
        if num < 1 or any(part % num for part in parts):
            raise LayoutError(
                f"{self.name}: the parts {parts} of dim {dim} cannot hold {num} heads each; use "
                f"parts that are multiples of {num}"
            )
        if len(self.split[dim]) > 1:
            raise LayoutError(
                f"{self.name}: heads are cut over the axes {self.split[dim]}; use one axis"
            )

    def _check_ranges(self, extent: int) -> None:
        """Refuse `ranges` that leave elements out, overlap, or follow several axes."""
        ranges = {
            index_range
            for index_ranges in self.ranges
            for index_range in index_ranges
            if index_range[0] < min(index_range[1], extent)
        }
        starts, stops = zip(*sorted(ranges), strict=True) if ranges else ((), ())
        if (0, *stops) != (*starts, extent) or len(self.split_axes) != 1 or any(self.parts):
            raise LayoutError(
                f"{self.name}: the ranges {self.ranges} of a dim of {extent} elements over the "
                f"axes {self.split_axes} leave some out or overlap; use ranges along one axis "
                f"that are equal or apart, without parts"
            )

    @property
    def split_axes(self) -> Axes:
        """Every axis that cuts some dim."""
        return tuple(axis for dim in self.split for axis in dim)

    @property
    def is_shared(self) -> bool:
        """True if several ranks along the splitting axis may hold the same heads."""
        return self.heads is not None and self.heads.shared and bool(self.split_axes)

    @property
    def is_whole(self) -> bool:
        """True if every rank holds the full tensor and computes its full gradient."""
        cut = self.split_axes or self.unreduced or self.stages
        return not cut and self.view == "dense"

    def named(self, name: str) -> "Layout":
        """Return the same layout under another name."""
        return replace(self, name=name)

    def on(self, *stages: int) -> "Layout":
        """Return the same layout, held by these indices along `pipe`."""
        return replace(self, stages=tuple(sorted(set(stages))))
