"""A parameter and the ranks with which it shares its gradient, as its layout says them.

A wrapper works by the layouts that it was given, else by what the parameters say themselves. A
layout speaks of axes, so it counts where tpc's mesh has them and the wrapper sums over tpc's batch
ranks. Elsewhere a layer sums partial gradients over its own group, and the wrapper over the group
that it was given, which must not be one that cuts a parameter.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.bucket_plan import BucketEntry
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import BATCH_AXES, gradient_ranks, num_replicas
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import Layouts, Mark, layout_of, mark, mark_of

Named = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True)
class ParamSpec:
    """A parameter whose gradient is summed over `group`, then divided by `divide`.

    deferred: after all others, when the step's messages have gone. So it must be with a weight that
    several stages hold: a sum that one of them begins before it has sent what the other still
    waits for stops both, on one group always and on two where a device runs one after another.
    sparse_rows: few rows of the gradient are not zero, so it travels as these (sparse_grads.py), in
    no bucket.
    """

    name: str
    parameter: nn.Parameter
    group: Group
    divide: int = 1
    deferred: bool = False
    sparse_rows: bool = False

    @property
    def key(self) -> Hashable:
        """Gradients with equal keys may travel in one bucket."""
        p = self.parameter
        alone = self.name if self.sparse_rows else ""
        return p.dtype, p.device, ranks_of(self.group), self.divide, self.deferred, alone

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
        """What a plan of buckets needs to know of it."""
        num = 0 if self.sparse_rows else self.parameter.numel()
        return BucketEntry(index, num, self.sum_dtype.itemsize, self.key)

    def view(self, flat: Tensor, offset: int) -> Tensor:
        """The part of a bucket from `offset` on, with the parameter's own strides if dense."""
        like = torch.empty_like(self.parameter, device="meta")
        return flat.as_strided(like.shape, like.stride(), offset)


def layouts_of(
    module: nn.Module | None,
    named: Named,
    given: Mapping[str, Layout] | None,
    over: Iterable[int] | None = None,
) -> Layouts:
    """Layouts by which gradients are summed; a parameter that is not listed has none to follow.

    named: the parameters. given: if not None, these alone. over: ranks over which the wrapper sums
    what is not listed; None: tpc's batch ranks, or everybody.
    """
    if given is not None:
        if module is not None:
            mark(module, dict(given))
        return dict(given)
    if module is not None:
        mark(module)
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
    """The ranks that a parameter's layer says cut it, or each have a part of its gradient."""
    mark = mark_of(parameter)
    return None if mark is None else cast(Group | None, mark.group)


def is_cut(layout: Layout | None, parameter: Tensor) -> bool:
    """Whether this rank holds a part of it only."""
    if layout is None or not layout.split_axes:
        return False
    if follows(layout, parameter):
        return tpc.topology.view(layout.view).axis_size(*layout.split_axes) > 1
    group = group_of(parameter)
    return group is None or group.size() > 1


def refuse_cut(named: Named, over: Sequence[int], who: str) -> None:
    """None of these parameters may be cut, or have a part of its gradient, on several of `over`.

    Raises:
        LayoutError: some are.
    """
    ranks = {*over}
    found = [
        (name, group)
        for name, p in named
        if (group := group_of(p)) is not None
        and not cast(Mark, mark_of(p)).layout.is_whole
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


def num_batches(layout: Layout) -> int:
    """Over how many batches a mean gradient is taken."""
    return num_replicas(layout, tpc.topology.view(layout.view))


def take_over(shared: Iterable[ParamSpec]) -> list[Mark]:
    """Marks of the parameters whose layers need not sum, as they are summed here; to `remove`."""
    taken: list[Mark] = []
    for s in shared:
        mark, group = mark_of(s.parameter), group_of(s.parameter)
        if mark is None or group is None or not mark.layout.unreduced:
            continue
        if {*ranks_of(group)} <= {*ranks_of(s.group)}:
            mark.num_reducers += 1
            taken.append(mark)
    return taken
