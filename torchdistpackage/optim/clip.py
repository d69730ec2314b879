"""The gradient norm of a model, on every rank, for any layout.

Each element counts once: the lowest rank of the group that holds it counts it. So replicated and
tied parameters count once, and an empty stage adds zero. A stage's own parameters exist only on
that stage, whatever else their layout says. If a group that tpc does not know cuts a layer, ranks
first sum over that group. One all-reduce adds up the rest. For an optimizer that shards, each rank
adds its shards, and the all-reduce is over all ranks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.attendance import expect_all_once
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.ddp.param_spec import follows, group_of
from torchdistpackage.ddp.sharded import ParamShard, ShardedOptimizer, owners_of
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.derive import holders_along, replica_ranks, spoken_slices
from torchdistpackage.layout.layout import Axes, HeadSplit, Layout
from torchdistpackage.layout.mark import layout_of, place_of
from torchdistpackage.topology.mesh import Mesh

INF = float("inf")
Kind = tuple[torch.dtype, torch.device]
_HALVES = (torch.float16, torch.bfloat16)
REPLICATED = Layout("", ())


@dataclass
class NormTerm:
    """A group of parameters, and the factor `share` by which their sum enters the norm.

    over: ranks that first add up their sums. counts: this rank counts the result.
    """

    share: float = 1.0
    over: Group | None = None
    counts: bool = True
    tensors: list[Tensor] = field(default_factory=list)


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Parameter | Iterable[nn.Parameter] | ShardedOptimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    layouts: Sequence[Layout] | None = None,
    group: Group | None = None,
) -> Tensor:
    """Clip gradients like torch's function of the same name, over all stages and shards of a model.

    parameters: the parameters, or the ZeroOptimizer that shards them. Given its parameters, the
        function finds that optimizer itself.
    layouts: the layout of each parameter, with tpc set up; default: what its layer declares.
    group: ranks that together hold the model. Default: tpc's model group, or all ranks for shards
        and with experts shared over data ranks. Without tpc: this rank and the groups that cut its
        parameters.

    Returns the norm before clipping, equal on all ranks of the group. No host synchronisation
    unless `error_if_nonfinite`.

    Raises:
        LayoutError: some of the parameters belong to a ZeroOptimizer and others do not, or the
            group lacks ranks that share them.
        CommError: at the first call, others of the group have not called it.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set, on all ranks alike.
        ValueError: `norm_type` is not a positive number.
    """
    if not norm_type > 0:
        raise ValueError(
            f"norm_type is {norm_type}; clip by a positive one, or by inf, the largest element"
        )
    owners, tensors = [parameters], list[Tensor]()
    if not isinstance(parameters, ShardedOptimizer):
        tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owners = owners_of(tensors)
    if owners:
        group = resolve_group(group, "global")
        shards = _shards_of(owners, tensors)
        parts, tensors = counted_shards(shards, group), [shard.tensor for shard in shards]
    else:
        if group is None and tpc.is_set:
            # experts are cut over ranks of several batches; all ranks decide alike, with or without
            shares_experts = tpc.topology.expert.axis_size("expert") > 1
            group = tpc.get_group("global" if shares_experts else "model")
        parts = counted(tensors, layouts, group)
    _expect_clipping(parts, group)
    norm = _norm(parts, norm_type, group)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the {norm_type:g}-norm of the gradients of all stages is {norm.item()}; look for "
            f"the first step with a large loss, or clip with error_if_nonfinite=False"
        )
    scale_gradients(tensors, clip_factor(norm, max_norm))
    return norm


def clip_factor(norm: Tensor, max_norm: float, count: Tensor | None = None) -> Tensor:
    """Return the factor that clips gradients of this norm to `max_norm`, as torch clips them.

    count: how many terms the gradients are sums of; the factor makes them those of the mean, whose
        norm is clipped.
    """
    if count is None:
        return (max_norm / (norm + 1e-6)).clamp(max=1.0)
    # 1 / count * min(1, max_norm / (norm / count + 1e-6)), in as few operations as there are
    return torch.maximum(count, torch.add(norm, count, alpha=1e-6) / max_norm).reciprocal()


def _shards_of(
    owners: Sequence[ShardedOptimizer], parameters: Sequence[Tensor]
) -> list[ParamShard]:
    """Return the shards of these parameters (default: all) once their gradients are reduced."""
    for owner in owners:
        owner.reducer.finish()
    if not parameters:
        return [shard for owner in owners for shard in owner.shards]
    owned = {id(h.spec.parameter) for owner in owners for some in owner.partitions for h in some}
    others = [p for p in parameters if p.grad is not None and id(p) not in owned]
    if others:
        raise LayoutError(
            f"{len(parameters)} parameters to clip: a ZeroOptimizer shards "
            f"{len(parameters) - len(others)}, and {len(others)} have gradients of their own, the "
            f"first of shape {tuple(others[0].shape)}; clip the optimizer and the others in two "
            f"calls"
        )
    requested = {id(p) for p in parameters}
    return [s for owner in owners for s in owner.shards if id(s.parameter) in requested]


def norm_of_counted(parameters: Sequence[Tensor], norm_type: float, group: Group | None) -> Tensor:
    """Return the norm of these gradients over `group`, with each element counted once."""
    parts = counted(parameters, None, group)
    _expect_clipping(parts, group)
    return _norm(parts, norm_type, group)


def _expect_clipping(parts: Sequence[NormTerm], group: Group | None) -> None:
    """Raise CommError at the first call if other ranks of the group do not clip."""
    for over in (*(part.over for part in parts), group):
        if over is not None:
            expect_all_once("clip_grad_norm_()", over)


def _norm(parts: Sequence[NormTerm], norm_type: float, group: Group | None) -> Tensor:
    """Return the norm over `group` of the terms that its ranks count."""
    is_max = norm_type == INF
    reduce = primitives.MAX if is_max else primitives.SUM
    device = _device_of(parts) if group is None else primitives.device_of(group)
    terms: list[Tensor] = []
    for part in parts:
        # a device for the all-reduce: offloaded shards are in host memory, and a rank may have none
        part_device = _device_of([part], device)
        if part.over is not None:
            part_device = primitives.device_of(part.over)
        power = grad_sq_norm(part.tensors, norm_type, part_device)
        if part.over is not None:
            power = primitives.all_reduce(power, part.over, reduce)
        if part_device != device:
            power = power.to(grad_sq_norm([], norm_type, device))
        if part.counts:
            terms.append(power if is_max or part.share == 1 else power * part.share)
    total = terms[0] if terms else grad_sq_norm([], norm_type, device)
    for term in terms[1:]:
        total = torch.maximum(total, term) if is_max else total + term
    if group is not None:
        total = primitives.all_reduce(total, group, reduce)
    return total if is_max else total ** (1.0 / norm_type)


def _device_of(parts: Sequence[NormTerm], default: torch.device | None = None) -> torch.device:
    """Return the device of the first gradient."""
    grads = (p.grad for part in parts for p in part.tensors if p.grad is not None)
    first = next(grads, None)
    return (default or torch.device("cpu")) if first is None else first.device


def grad_sq_norm(parameters: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of |g|^p over these gradients, or the largest |g| for p = inf; zero if none.

    A NaN makes the sum NaN, and the largest |g| infinite. Parameters without gradient do not count.
    The result is 0-dim on `device`, float64 on the CPU and float32 elsewhere, also on ranks without
    gradients.
    """
    grads = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
    if not grads:
        wide = _wide_dtype(device)
        return torch.zeros((), dtype=wide, device=device)
    norms = grad_norms(grads, norm_type, device)
    if norm_type == INF:
        # a NaN becomes infinity: some backends' maximum drops a NaN, but all of them keep infinity
        return norms.nan_to_num(nan=INF, posinf=INF).max()
    return (norms**norm_type).sum()


def grad_norms(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of each gradient, in order, on `device`: float64 on the CPU, else float32.

    A NaN or infinity in a gradient makes its norm NaN or infinite.
    """
    wide = _wide_dtype(device)
    if not grads:
        return torch.zeros(0, dtype=wide, device=device)
    kinds = {(grad.dtype, grad.device) for grad in grads}
    if len(kinds) == 1:
        return torch.stack(_norms_of(grads, norm_type)).to(device, wide)
    norms: list[Tensor] = [grads[0]] * len(grads)
    for kind in kinds:
        places = [i for i, grad in enumerate(grads) if (grad.dtype, grad.device) == kind]
        group_norms = _norms_of([grads[i] for i in places], norm_type)
        for i, norm in zip(places, group_norms, strict=True):
            norms[i] = norm.to(device, wide)
    return torch.stack(norms)


def _wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which norms are added on `device`."""
    return torch.float64 if device.type == "cpu" else torch.float32


def _norms_of(grads: Sequence[Tensor], norm_type: float) -> tuple[Tensor, ...]:
    """Return the norms of gradients of one dtype on one device."""
    # in float32: a norm in float16 or bfloat16 would be rounded, or overflow
    dtype = torch.float32 if grads[0].dtype in _HALVES else None
    return torch._foreach_norm(grads, norm_type, dtype=dtype)


def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by a 0-dim factor on their device; each product is rounded once."""
    for (dtype, device), grads in _alike(p.grad for p in parameters if p.grad is not None):
        local_factor = factor.to(device)
        if dtype not in _HALVES:
            # one dtype for all, or torch multiplies tensor by tensor
            torch._foreach_mul_(grads, local_factor.to(dtype))
            continue
        for grad in grads:
            # torch would round a 0-dim factor to the half dtype first, to zero if the norm is large
            torch.mul(grad, local_factor.float().view([1] * grad.dim()), out=grad)


def _alike(grads: Iterable[Tensor]) -> Iterable[tuple[Kind, list[Tensor]]]:
    """Group gradients by dtype and device, because torch's foreach functions take one of each."""
    by_kind: dict[Kind, list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.dtype, grad.device), []).append(grad)
    return by_kind.items()


# -- which gradients a rank counts --------------------------------------------------------


def counted(
    parameters: Sequence[Tensor], layouts: Sequence[Layout] | None, group: Group | None
) -> list[NormTerm]:
    """Return the terms that this rank counts of the norm of these parameters.

    group: the ranks of the norm; None: this rank alone.
    """
    among = None if group is None else frozenset(ranks_of(group))
    known_layouts = [layout_of(p) for p in parameters] if layouts is None else layouts
    own_term, cut = NormTerm(), dict[tuple[int, ...], NormTerm]()
    unsharded: list[Tensor] = []
    for parameter, layout in zip(parameters, known_layouts, strict=True):
        if place_of(parameter) is not None:
            unsharded += _counted_copy(parameter)
        elif (
            tpc.is_set
            and layout is not None
            and (layouts is not None or follows(layout, parameter))
        ):
            if counts_here(layout, among):
                own_term.tensors.append(_counted_part(parameter))
        elif (over := _cut_over(layout, parameter)) is not None:
            first = min({*ranks_of(over)} & (among or {*ranks_of(over)}))
            part = NormTerm(over=over, counts=among is None or first == _me(over))
            term = cut.setdefault(ranks_of(over), part)
            if _holders_over(layout, over).start == over.rank():
                term.tensors.append(_counted_part(parameter))
        else:
            unsharded.append(parameter)
    if all(part.counts for part in cut.values()) and (
        not tpc.is_set or counts_here(REPLICATED, among)
    ):
        own_term.tensors += unsharded
    return [own_term, *(cut[ranks] for ranks in sorted(cut))]


def _counted_copy(parameter: Tensor) -> list[Tensor]:
    """Return what to count of a shard, if this process holds several shards of a parameter."""
    position = place_of(parameter)
    assert position is not None
    if not position.layout.split_axes:
        return [parameter] if position.index == 0 else []
    if holders_along(position.layout, position.num, position.index).start != position.index:
        return []
    return [_spoken_part(parameter, position.layout, position.index)]


def _counted_part(parameter: Tensor) -> Tensor:
    """Return the part that this rank counts of a parameter that others hold too, with its grad."""
    layout, group = layout_of(parameter), group_of(parameter)
    if layout is None or group is None:
        return parameter
    return _spoken_part(parameter, layout, group.rank())


def _spoken_part(parameter: Tensor, layout: Layout, index: int) -> Tensor:
    """Return the part that the shard at `index` counts, with its gradient."""
    if not layout.ranges or parameter.grad is None:
        return parameter
    dim = next(dim for dim, axes in enumerate(layout.split) if axes)
    counted = spoken_slices(layout, index)
    if len(counted) == len(layout.ranges[index]):
        return parameter

    def of(x: Tensor) -> Tensor:
        parts = [x.narrow(dim, span.start, span.stop - span.start) for span in counted]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)

    part = of(parameter.detach())
    part.grad = of(parameter.grad)
    return part


def counted_shards(shards: Iterable[ParamShard], group: Group) -> list[NormTerm]:
    """Return the terms that this rank counts of a norm of its shards over the ranks of `group`.

    Raises:
        LayoutError: `group` lacks ranks that share a parameter.
    """
    among, parts = frozenset(ranks_of(group)), dict[float, NormTerm]()
    for shard in shards:
        if not among.issuperset(ranks_of(shard.group)):
            raise LayoutError(
                f"{shard.name} is shared by ranks {ranks_of(shard.group)}, but its norm is asked "
                f"over {sorted(among)}; leave group= out, or name one that has them all"
            )
        if share := _share(shard, among):
            parts.setdefault(share, NormTerm(share)).tensors.append(shard.tensor)
    return list(parts.values())


def _share(shard: ParamShard, among: frozenset[int]) -> float:
    """Return the factor by which this rank counts a shard, so that all ranks count it once.

    If it is not known which ranks hold the same elements, all holders count equal fractions.
    """
    layout = shard.layout or layout_of(shard.parameter)
    is_known = layout is None or shard.layout is not None or follows(layout, shard.parameter)
    if tpc.is_set and is_known:
        return float(counts_here(layout or REPLICATED, among, shard.group))
    over = _cut_over(layout, shard.parameter)
    parts = 1 if over is None else over.size() / len(_holders_over(layout, over))
    if tpc.is_set:
        parts *= tpc.topology.dense.axis_size("pipe")
    return min(1.0, shard.group.size() * parts / len(among))


def _cut_over(layout: Layout | None, parameter: Tensor) -> Group | None:
    """Return the group that cuts a parameter; None if none does."""
    return group_of(parameter) if layout is not None and layout.split_axes else None


def _holders_over(layout: Layout | None, over: Group) -> range:
    """Return which indices of the group that cuts a parameter hold the same part as this rank."""
    return holders_along(layout or REPLICATED, over.size(), over.rank())


def _me(group: Group) -> int:
    """Return this process's global rank."""
    return ranks_of(group)[group.rank()]


def counts_here(
    layout: Layout, among: frozenset[int] | None, shared_by: Group | None = None
) -> bool:
    """Return True if this rank counts its part of a parameter, or its shard of that part.

    among: the ranks of the norm; None: this rank alone. shared_by: the ranks that hold the shards.
    """
    if among is None:
        return True
    counting = _counting(layout, among)
    return counting == tpc.rank if shared_by is None else counting in ranks_of(shared_by)


def _counting(layout: Layout, among: frozenset[int]) -> int:
    """Return the rank that counts this rank's part of a parameter; -1 if none does."""
    mesh = tpc.topology.view(layout.view)
    stages = layout.stages
    if not stages and "pipe" in mesh.names:
        stages = (mesh.coord(tpc.rank)["pipe"],)
    return _lowest(layout.split_axes, layout.heads, stages, mesh, tpc.rank, among)


@lru_cache(maxsize=256)
def _lowest(
    split: Axes,
    heads: HeadSplit | None,
    stages: tuple[int, ...],
    mesh: Mesh,
    rank: int,
    among: frozenset[int],
) -> int:
    """Return the lowest rank of `among` that holds the same part as `rank`; -1 if none does."""
    length = 1 if heads is None else heads.groups * heads.members
    same_cut = Layout("", (length,), (split,), stages=stages, heads=heads)
    holders = replica_ranks(same_cut, mesh, rank)
    return min(among.intersection(holders), default=-1)
