"""A parameter with the group over which its gradient is summed, as its layout says.

A wrapper uses the layouts passed to it, or else those on the parameters. A layout names axes, so it
applies only if tpc's mesh has them and the wrapper sums over tpc's batch ranks. Otherwise a layer
sums partial gradients over its own group, and the wrapper sums over the group passed to it, which
must not cut a parameter.
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
from torchdistpackage.layout.derive import (
    BATCH_AXES,
    gradient_ranks,
    holders_along,
    num_replicas,
    sharding_ranks,
)
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import Layouts, Mark, layout_of, mark, mark_of

Named = Iterable[tuple[str, Tensor]]


class ReplicatedTensor(NamedTuple):
    """A tensor that every rank of `group` holds a copy of."""

    name: str
    tensor: Tensor
    group: Group


@dataclass(frozen=True)
class ParamSpec:
    """A parameter whose gradient is summed over `group`, then divided by `divide`.

    deferred: sum it after all others, when the step's messages have been sent. A weight shared by
        several stages needs this: if one stage starts the sum before it sends a message that the
        other waits for, both hang. That always happens on one group, and on two groups if a device
        runs their calls one after another.
    sparse_rows: it travels as rows (sparse_grads.py), in no bucket.
    bucket: only specs with equal numbers share a bucket.
    replicas: the ranks with the same shard, over which the sum over `group` is summed again.
    """

    name: str
    parameter: nn.Parameter
    group: Group
    divide: int = 1
    deferred: bool = False
    sparse_rows: bool = False
    bucket: int = 0
    replicas: Group | None = None

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
        replicas: Group | None = None,
    ) -> "ParamSpec":
        """Return the spec of a parameter with this layout, whose gradient is summed over `group`.

        mean: divide by the number of the layout's batches if its ranks are summed, or else by the
            number of ranks.
        over: all ranks that are summed in the end, if `group` is only some of them.
        """
        over = ranks_of(group) if over is None else over
        divide = len(over) if mean else 1
        if mean and layout is not None and {*over} == {*summed_over(layout)}:
            divide = num_replicas(layout, tpc.topology.view(layout.view))
        is_tied = layout is not None and len(layout.stages) > 1
        return cls(name, parameter, group, divide, deferred=is_tied, replicas=replicas)

    @property
    def key(self) -> Hashable:
        """Key of the gradient; those with equal keys may share a bucket."""
        p, alone = self.parameter, self.name if self.sparse_rows else ""
        replicas = () if self.replicas is None else ranks_of(self.replicas)
        kind = p.dtype, p.device, ranks_of(self.group), replicas
        return *kind, self.divide, self.deferred, alone, self.bucket

    @property
    def is_early(self) -> bool:
        """True if its bucket may be launched while the backward runs."""
        return not (self.deferred or self.sparse_rows)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which gradients accumulate: fp32 for narrower floats."""
        dtype = self.parameter.dtype
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    @property
    def is_wider(self) -> bool:
        """True if gradients accumulate in another dtype than the parameter's."""
        return self.sum_dtype != self.parameter.dtype

    def entry(self, index: int) -> BucketEntry:
        """Return the parameter as an entry for the plan of buckets."""
        num = 0 if self.sparse_rows else self.parameter.numel()
        return BucketEntry(index, num, self.sum_dtype.itemsize, self.key)

    def view(self, flat: Tensor, offset: int) -> Tensor:
        """Return the view of a bucket from `offset` on, with the parameter's own strides if
        dense.
        """
        like = torch.empty_like(self.parameter, device="meta")
        return flat.as_strided(like.shape, like.stride(), offset)


def batch_group() -> Group:
    """Return the ranks that see different tokens: those along tpc's data and context axes, else all
    ranks.
    """
    if tpc.is_set:
        return tpc.groups.along(tpc.topology.dense, BATCH_AXES)
    return resolve_group(None, "data")


def layouts_of(
    module: nn.Module | None,
    named: Named,
    chosen: Mapping[str, Layout] | None,
    over: Iterable[int] | None = None,
) -> Layouts:
    """Return the layouts by which gradients of the parameters `named` are summed.

    chosen: if not None, the only layouts to use.
    """
    chosen = None if chosen is None else dict(chosen)
    if module is not None:
        mark(module, chosen)
    if chosen is not None:
        return chosen
    if not tpc.is_set:
        return {}
    if over is not None and {*over} != {*tpc.topology.dense.group(tpc.rank, BATCH_AXES)}:
        return {}
    layouts = {name: x for name, p in named if (x := layout_of(p)) and follows(x, p)}
    return {name: layout for name, layout in layouts.items() if not layout.is_whole}


def follows(layout: Layout, parameter: Tensor) -> bool:
    """Return whether tpc's mesh tells over which ranks this parameter is cut."""
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
    """Return the ranks that each hold a shard of a parameter, or a partial sum of its gradient."""
    mark = mark_of(parameter)
    return None if mark is None else cast(Group | None, mark.group)


def refuse_cut(named: Named, over: Sequence[int], who: str) -> None:
    """Raise LayoutError if several ranks of `over` cut a parameter, or hold partial gradients."""
    ranks = {*over}
    cut_parameters = [
        (name, group)
        for name, p in named
        if (group := group_of(p)) is not None
        and not cast(Layout, layout_of(p)).is_whole
        and len(ranks & {*ranks_of(group)}) > 1
    ]
    if cut_parameters:
        name, group = cut_parameters[0]
        raise LayoutError(
            f"{who} assumes that ranks {tuple(over)} hold the same parameters, but "
            f"{len(cut_parameters)} of them are cut over ranks {ranks_of(group)}, such as {name}; "
            "give it a group of ranks that hold the same, or set up tpc with that axis before the "
            "model is made"
        )


def summed_over(layout: Layout) -> tuple[int, ...]:
    """Return the ranks whose gradients are summed."""
    return gradient_ranks(layout, tpc.topology.view(layout.view), tpc.rank)


def sum_group(layout: Layout | None, group: Group, over: Collection[int] | None = None) -> Group:
    """Return the group over which a gradient is summed: the layout's, or `group` without one.

    over: the ranks that count as those of `group`, if it is only some of them.
    """
    ranks = None if layout is None else summed_over(layout)
    same = ranks is None or {*ranks} == {*(ranks_of(group) if over is None else over)}
    return group if same else tpc.groups.of(ranks)


def shard_groups(layout: Layout | None, num_data: int) -> tuple[Group, Group | None]:
    """Return the ranks that shard the sum of a parameter, and the ranks with the same shard.

    num_data: number of neighbours along tpc's data axis that shard (`sharding_ranks` of
    layout/derive.py).
    """
    dense = tpc.topology.dense
    summed = tuple(dense.group(tpc.rank, BATCH_AXES)) if layout is None else summed_over(layout)
    ranks, same = sharding_ranks(summed, dense, tpc.rank, num_data)
    return tpc.groups.of(ranks), tpc.groups.of(same) if len(same) > 1 else None


def take_over(specs: Iterable[ParamSpec]) -> list[Mark]:
    """Claim partial gradients that these specs sum, so that layers do not sum them.

    Return the marks, whose `remove` gives the claim back.
    """
    marks: list[Mark] = []
    for s in specs:
        mark, group = mark_of(s.parameter), group_of(s.parameter)
        if mark is None or group is None:
            continue
        summing_ranks = ranks_of(group)
        if mark.layout.is_shared:
            summing_ranks = [
                summing_ranks[i]
                for i in holders_along(mark.layout, len(summing_ranks), group.rank())
            ]
        elif not mark.layout.unreduced:
            continue
        if {*summing_ranks} <= {*ranks_of(s.group)}:
            mark.num_reducers += 1
            marks.append(mark)
    return marks
