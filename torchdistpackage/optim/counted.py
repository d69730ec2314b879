"""Which gradients a rank counts in the norm of the whole model, so that each element counts once.

Among the ranks that add up, of those that hold the same elements the lowest counts them. A stage's
own parameters are held on that stage alone, whatever else its layout says. What a layer cuts over a
group that tpc does not know is first added up over that group.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol, runtime_checkable

from torch import Tensor

from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.param_spec import follows, group_of
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.zero.param_shard import ParamPartition, ParamShard
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import replica_ranks
from torchdistpackage.layout.layout import Axes, Layout
from torchdistpackage.layout.mark import layout_of
from torchdistpackage.topology.mesh import Mesh

WHOLE = Layout("", ())


@runtime_checkable
class ShardedOptimizer(Protocol):
    """An optimizer that keeps a part of each parameter here: ZeroOptimizer."""

    held: Sequence[Sequence[ParamPartition]]
    shards: Sequence[ParamShard]
    reducer: Reducer


@dataclass
class NormTerm:
    """Some of the parameters, counted by `share`.

    over: ranks that add theirs up first; the sum counts if `counts`.
    """

    share: float = 1.0
    over: Group | None = None
    counts: bool = True
    held: list[Tensor] = field(default_factory=list)


def counted(
    parameters: Sequence[Tensor], layouts: Sequence[Layout] | None, group: Group | None
) -> list[NormTerm]:
    """What this rank counts of these; group: ranks that add up, None: this rank alone."""
    among = None if group is None else frozenset(ranks_of(group))
    own = [layout_of(p) for p in parameters] if layouts is None else layouts
    mine, cut = NormTerm(), dict[tuple[int, ...], NormTerm]()
    whole: list[Tensor] = []
    for parameter, layout in zip(parameters, own, strict=True):
        if (
            tpc.is_set
            and layout is not None
            and (layouts is not None or follows(layout, parameter))
        ):
            if _counts_here(layout, among):
                mine.held.append(parameter)
        elif (over := _cut_over(layout, parameter)) is not None:
            first = min({*ranks_of(over)} & (among or {*ranks_of(over)}))
            part = NormTerm(over=over, counts=among is None or first == _me(over))
            cut.setdefault(ranks_of(over), part).held.append(parameter)
        else:
            whole.append(parameter)
    if all(part.counts for part in cut.values()) and (not tpc.is_set or _counts_here(WHOLE, among)):
        mine.held += whole
    return [mine, *(cut[ranks] for ranks in sorted(cut))]


def counted_shards(shards: Iterable[ParamShard], group: Group) -> list[NormTerm]:
    """What this rank counts of its shards, of ranks `group` that add up.

    Raises:
        LayoutError: ranks that share a parameter are not among them.
    """
    among, parts = frozenset(ranks_of(group)), dict[float, NormTerm]()
    for shard in shards:
        if not among.issuperset(ranks_of(shard.group)):
            raise LayoutError(
                f"{shard.name} is shared by ranks {ranks_of(shard.group)}, but its norm is asked "
                f"over {sorted(among)}; leave group= out, or name one that has them all"
            )
        if share := _share(shard, among):
            parts.setdefault(share, NormTerm(share)).held.append(shard.tensor)
    return list(parts.values())


def _share(shard: ParamShard, among: frozenset[int]) -> float:
    """How much of a shard this rank counts, so that all ranks count it once.

    Where nobody knows which ranks hold the same elements, each group that shares a parameter
    counts its part of it.
    """
    layout = shard.layout or layout_of(shard.parameter)
    is_known = layout is None or shard.layout is not None or follows(layout, shard.parameter)
    if tpc.is_set and is_known:
        return float(_counting(layout or WHOLE, among) in ranks_of(shard.group))
    over = _cut_over(layout, shard.parameter)
    parts = 1 if over is None else over.size()
    if tpc.is_set:
        parts *= tpc.topology.dense.axis_size("pipe")
    return min(1.0, shard.group.size() * parts / len(among))


def _cut_over(layout: Layout | None, parameter: Tensor) -> Group | None:
    """The group of its layer's own that cuts a parameter."""
    return group_of(parameter) if layout is not None and layout.split_axes else None


def _me(group: Group) -> int:
    return ranks_of(group)[group.rank()]


def _counts_here(layout: Layout, among: frozenset[int] | None) -> bool:
    return among is None or _counting(layout, among) == tpc.rank


def _counting(layout: Layout, among: frozenset[int]) -> int:
    mesh = tpc.topology.view(layout.view)
    stages = layout.stages
    if not stages and "pipe" in mesh.names:
        stages = (mesh.coord(tpc.rank)["pipe"],)
    return _lowest(layout.split_axes, stages, mesh, tpc.rank, among)


@lru_cache(maxsize=256)
def _lowest(
    split: Axes, stages: tuple[int, ...], mesh: Mesh, rank: int, among: frozenset[int]
) -> int:
    """Of the ranks `among` these that hold what `rank` holds of a parameter, the lowest."""
    holders = replica_ranks(Layout("", (1,), (split,), stages=stages), mesh, rank)
    return min(among.intersection(holders), default=-1)
