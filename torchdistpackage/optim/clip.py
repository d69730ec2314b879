"""The gradient norm of the whole model, on every rank, whatever the layout.

Each rank adds up what it *owns*: one owner an element over the ranks of a model, so replicated
and tied parameters count once and an empty stage adds zero. One all-reduce does the rest. Of an
optimizer that shards, each rank adds up its shards, over all ranks.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.ddp.reducer import Reducer
from torchdistpackage.ddp.zero.shards import Shard
from torchdistpackage.layout.derive import BATCH_AXES, owner, owns
from torchdistpackage.layout.layout import Layout

INF = float("inf")


@runtime_checkable
class Sharded(Protocol):
    """An optimizer that keeps a part of each parameter here: ZeroOptimizer."""

    shards: Sequence[Shard]
    reducer: Reducer


def clip_grad_norm_(
    parameters: nn.Parameter | Iterable[nn.Parameter] | Sharded,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    layouts: Sequence[Layout] | None = None,
    group: Group | None = None,
) -> Tensor:
    """Clip like torch's function of the same name, over the stages and shards of a model.

    parameters: or the ZeroOptimizer that shards them, whose layouts then count.
    layouts: one for each parameter, with tpc set up: shards are then counted as shards,
        replicated and tied parameters once. Without, every rank of the group holds parameters
        of its own, as the stages of a pipeline do.
    group: ranks that together hold the model; default tpc's model group, of shards all ranks.

    Returns the norm before clipping, equal on all ranks of the group. No host synchronisation
    unless `error_if_nonfinite`.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set, on all ranks alike.
    """
    sharded = isinstance(parameters, Sharded)
    group = resolve_group(group, "global" if sharded else "model")
    if sharded:
        parameters.reducer.finish()
        held = [shard.tensor for shard in parameters.shards]
        power = _power_of_shards(parameters.shards, norm_type, group)
    else:
        held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        mine = held
        if layouts is not None:
            pairs = zip(held, layouts, strict=True)
            mine = [p for p, layout in pairs if _speaks_for(layout)]
        power = local_power(mine, norm_type, primitives.device_of(group))
    norm = _norm(power, norm_type, group)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the {norm_type:g}-norm of the gradients of all stages is {norm.item()}; look for "
            f"the first step with a large loss, or clip with error_if_nonfinite=False"
        )
    scale_gradients(held, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _norm(power: Tensor, norm_type: float, group: Group) -> Tensor:
    """From what each rank of the group adds."""
    if norm_type == INF:
        return primitives.all_reduce(power, group, primitives.MAX)
    return primitives.all_reduce(power, group) ** (1.0 / norm_type)


def local_power(mine: Iterable[nn.Parameter], norm_type: float, device: torch.device) -> Tensor:
    """Sum of |g|^p over these gradients, or their largest |g| for p = inf; zero without any.

    A NaN among them makes the sum NaN, the largest infinite.

    0-dim on `device`, float64 on the CPU and float32 elsewhere, alike on ranks with and without
    gradients. Parameters without gradient do not count.
    """
    grads = [p.grad for p in mine if p.grad is not None and p.grad.numel()]
    wide = torch.float64 if device.type == "cpu" else torch.float32
    if not grads:
        return torch.zeros((), dtype=wide, device=device)
    norms = torch.stack([norm.to(wide) for norm in torch._foreach_norm(grads, norm_type)])
    if norm_type == INF:
        # not every backend's maximum keeps a NaN; all of them keep infinity
        return norms.nan_to_num(nan=INF, posinf=INF).max().to(device)
    return (norms**norm_type).sum().to(device)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients by a 0-dim factor on their device."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor.to(grads[0]))


def _speaks_for(layout: Layout) -> bool:
    """Whether this rank owns its shard among the ranks of its own model replica."""
    mesh = tpc.topology.view(layout.view)
    return owns(layout, mesh, tpc.rank, among=tpc.topology.model_axes)


def _power_of_shards(shards: Sequence[Shard], norm_type: float, group: Group) -> Tensor:
    """`local_power` of what this rank counts of each shard, where the group can sum it."""
    by_share: dict[float, list[nn.Parameter]] = {}
    for shard in shards:
        share = 1.0 if norm_type == INF else _share(shard, group)
        if share:
            by_share.setdefault(share, []).append(shard.tensor)
    total = local_power([], norm_type, primitives.device_of(group))
    for share, held in by_share.items():
        # offloaded shards are in host memory, and a rank may have none
        total += local_power(held, norm_type, held[0].device).to(total) * share
    return total


def _share(shard: Shard, group: Group) -> float:
    """How much of it this rank counts, so that all ranks of `group` count it once.

    With a layout, all of it on those that share it out together with its owner. Without, each of
    the groups that share out the same elements has one part: those left once stages and tensor
    ranks, which hold others, are counted.
    """
    layout = shard.layout
    if layout is not None:
        mesh = tpc.topology.view(layout.view)
        return float(owner(layout, mesh, tpc.rank) in ranks_of(shard.group))
    parts = 1
    if tpc.is_set:
        mesh = tpc.topology.dense
        parts = mesh.axis_size(*(axis for axis in mesh.names if axis not in BATCH_AXES))
    return 1 / max(1, group.size() // (shard.group.size() * parts))
