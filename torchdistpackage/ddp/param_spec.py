"""A parameter and the ranks with which it shares its gradient, by its layout.

A wrapper works by the layouts that it was given, else by those of the parameters. A layout speaks
of axes, so it counts where tpc's mesh has them and the wrapper sums over tpc's batch ranks.
Elsewhere a layer sums partial gradients over its own group, and the wrapper over the group that it
was given, which must not be one that cuts a parameter.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.ddp.bucket_plan import BucketEntry
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import BATCH_AXES, gradient_ranks, holders_along, num_replicas
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import Layouts, Mark, layout_of, mark, mark_of

Named = Iterable[tuple[str, Tensor]]


class ReplicatedTensor(NamedTuple):
    """A tensor of which every rank of `group` holds a copy."""

    name: str
    tensor: Tensor
    group: Group


@dataclass(frozen=True)
class ParamSpec:
    """A parameter whose gradient is summed over `group`, then divided by `divide`.

    deferred: after all others, when the step's messages have gone, as it must be with a weight of
    several stages: a sum that one begins before it has sent what the other still waits for stops
    both, on one group always and on two where a device runs one after another. sparse_rows: it
    travels as rows (sparse_grads.py), in no bucket. bucket: only equal numbers share a bucket.
    """

    name: str
    parameter: nn.Parameter
    group: Group
    divide: int = 1
    deferred: bool = False
    sparse_rows: bool = False
    bucket: int = 0

    @classmethod
    def from_layout(
        cls,
        name: str,
        parameter: nn.Parameter,
        layout: Layout | None,
        group: Group,
        *,
        mean: bool = True,
        over: Collection[int] | None = None,
    ) -> "ParamSpec":
        """The spec of a parameter with this layout, whose gradient is summed over `group`.

        mean: over the layout's batches where ranks are summed that it names, else over ranks.
        over: the ranks that are summed in the end, where `group` is not all of them.
        """
        over = ranks_of(group) if over is None else over
        divide = len(over) if mean else 1
        if mean and layout is not None and {*over} == {*summed_over(layout)}:
            divide = num_replicas(layout, tpc.topology.view(layout.view))
        is_tied = layout is not None and len(layout.stages) > 1
        return cls(name, parameter, group, divide, deferred=is_tied)

    @property
    def key(self) -> Hashable:
        """Gradients with equal keys may travel in one bucket."""
        p, alone = self.parameter, self.name if self.sparse_rows else ""
        kind = p.dtype, p.device, ranks_of(self.group)
        return *kind, self.divide, self.deferred, alone, self.bucket

    @property
    def is_early(self) -> bool:
        """Whether its bucket may leave while the backward runs."""
        return not (self.deferred or self.sparse_rows)

    @property
    def sum_dtype(self) -> torch.dtype:
        """In which gradients are added up: fp32 for narrower floats."""
        dtype = self.parameter.dtype
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    @property
    def is_wider(self) -> bool:
        """Whether gradients are added up in another dtype than the parameter's."""
        return self.sum_dtype != self.parameter.dtype

    def entry(self, index: int) -> BucketEntry:
        """The parameter as a plan of buckets sees it."""
        num = 0 if self.sparse_rows else self.parameter.numel()
        return BucketEntry(index, num, self.sum_dtype.itemsize, self.key)

    def view(self, flat: Tensor, offset: int) -> Tensor:
        """The part of a bucket from `offset` on, with the parameter's own strides if dense."""
        like = torch.empty_like(self.parameter, device="meta")
        return flat.as_strided(like.shape, like.stride(), offset)


def batch_group() -> Group:
    """Ranks that see different tokens: tpc's data and context axes, else everybody."""
    if tpc.is_set:
        return tpc.groups.along(tpc.topology.dense, BATCH_AXES)
    return resolve_group(None, "data")


def layouts_of(
    module: nn.Module | None,
    named: Named,
    given: Mapping[str, Layout] | None,
    over: Iterable[int] | None = None,
) -> Layouts:
    """Layouts by which gradients are summed, of the parameters `named` that follow one.

    given: if not None, these alone. over: ranks over which the wrapper sums what is not listed;
    None: tpc's batch ranks, or all.
    """
    given = None if given is None else dict(given)
    if module is not None:
        mark(module, given)
    if given is not None:
        return given
    if not tpc.is_set:
        return {}
    if over is not None and {*over} != {*tpc.topology.dense.group(tpc.rank, BATCH_AXES)}:
        return {}
    found = {name: x for name, p in named if (x := layout_of(p)) and follows(x, p)}
    return {name: layout for name, layout in found.items() if not layout.is_whole}


def follows(layout: Layout, parameter: Tensor) -> bool:
    """Whether tpc's mesh says over which ranks this parameter is cut."""
    if not tpc.is_set:
        return False
    mesh, cut = tpc.topology.view(layout.view), {*layout.split_axes, *layout.unreduced}
    if layout.stages and mesh.coord(tpc.rank).get("pipe") not in layout.stages:
        return False
    group = group_of(parameter)
    if group is None:
        return cut <= {*mesh.names}
    return not cut or ranks_of(group) == tuple(mesh.group(tpc.rank, cut))


def group_of(parameter: Tensor) -> Group | None:
    """The ranks that cut a parameter, or each have a part of its gradient, as its layer has it."""
    mark = mark_of(parameter)
    return None if mark is None else cast(Group | None, mark.group)


def refuse_cut(named: Named, over: Sequence[int], who: str) -> None:
    """Raise LayoutError if one of these is cut, or partly summed, over several ranks of `over`."""
    ranks = {*over}
    found = [
        (name, group)
        for name, p in named
        if (group := group_of(p)) is not None
        and not cast(Layout, layout_of(p)).is_whole
        and len(ranks & {*ranks_of(group)}) > 1
    ]
    if found:
        name, group = found[0]
        raise LayoutError(
            f"{who} takes ranks {tuple(over)} to hold the same parameters, but {len(found)} are "
            f"cut over ranks {ranks_of(group)}, {name} for one: give it a group of ranks that hold "
            f"the same, or set up tpc with that axis before the model is made"
        )


def summed_over(layout: Layout) -> tuple[int, ...]:
    """Ranks whose gradients are summed."""
    return gradient_ranks(layout, tpc.topology.view(layout.view), tpc.rank)


def sum_group(layout: Layout | None, group: Group, over: Collection[int] | None = None) -> Group:
    """Group over which a gradient is summed: `group` where there is no layout, or it says so.

    over: the ranks that count as `group`'s, where it is not all of them.
    """
    ranks = None if layout is None else summed_over(layout)
    same = ranks is None or {*ranks} == {*(ranks_of(group) if over is None else over)}
    return group if same else tpc.groups.of(ranks)


def take_over(specs: Iterable[ParamSpec]) -> list[Mark]:
    """Marks of the parameters whose layers need not sum, as they are summed here; to `remove`."""
    taken: list[Mark] = []
    for s in specs:
        mark, group = mark_of(s.parameter), group_of(s.parameter)
        if mark is None or group is None:
            continue
        parts = ranks_of(group)
        if mark.layout.is_shared:
            parts = [parts[i] for i in holders_along(mark.layout, len(parts), group.rank())]
        elif not mark.layout.unreduced:
            continue
        if {*parts} <= {*ranks_of(s.group)}:
            mark.num_reducers += 1
            taken.append(mark)
    return taken
