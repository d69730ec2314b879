"""The gradient norm of the whole model, on every rank, whatever the layout.

Each rank adds up what it counts (counted.py): of the ranks of a model one counts an element, so
that replicated and tied parameters count once and an empty stage adds zero. One all-reduce does
the rest. Of an optimizer that shards, each rank adds up its shards, over all ranks.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.ddp.zero.param_shard import ParamShard
from torchdistpackage.ddp.zero.state_dict import owners_of
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.optim.counted import NormTerm, ShardedOptimizer, counted, counted_shards

INF = float("inf")
Kind = tuple[torch.dtype, torch.device]
_HALVES = (torch.float16, torch.bfloat16)


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
    """Clip like torch's function of the same name, over the stages and shards of a model.

    parameters: or the ZeroOptimizer that shards them, which is also found by its parameters.
    layouts: one for each parameter, with tpc set up; default what its layer says of it. Shards
        count as shards, replicated and tied parameters once, a stage's own on every stage.
    group: ranks that together hold the model; default tpc's model group, of shards all ranks.
        Without tpc this rank alone, and the groups that cut its parameters.

    Returns the norm before clipping, equal on all ranks of the group. No host synchronisation
    unless `error_if_nonfinite`.

    Raises:
        LayoutError: some of the parameters belong to a ZeroOptimizer and others do not, or the
            group lacks ranks that share them.
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set, on all ranks alike.
        ValueError: `norm_type` is no positive number.
    """
    if not norm_type > 0:
        raise ValueError(
            f"norm_type is {norm_type}; clip by a positive one, or by inf, the largest element"
        )
    owners, held = [parameters], list[Tensor]()
    if not isinstance(parameters, ShardedOptimizer):
        held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        owners = owners_of(held)
    if owners:
        group = resolve_group(group, "global")
        shards = _shards_of(owners, held)
        parts, held = counted_shards(shards, group), [shard.tensor for shard in shards]
    else:
        if group is None and tpc.is_set:
            group = tpc.get_group("model")
        parts = counted(held, layouts, group)
    norm = _norm(parts, norm_type, group)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the {norm_type:g}-norm of the gradients of all stages is {norm.item()}; look for "
            f"the first step with a large loss, or clip with error_if_nonfinite=False"
        )
    scale_gradients(held, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _shards_of(owners: Sequence[ShardedOptimizer], held: Sequence[Tensor]) -> list[ParamShard]:
    """The shards of these parameters, or all, with their sums in them."""
    for owner in owners:
        owner.reducer.finish()
    if not held:
        return [shard for owner in owners for shard in owner.shards]
    owned = {id(h.shared.parameter) for owner in owners for some in owner.held for h in some}
    others = [p for p in held if p.grad is not None and id(p) not in owned]
    if others:
        raise LayoutError(
            f"of {len(held)} parameters to clip a ZeroOptimizer shards {len(held) - len(others)}, "
            f"and {len(others)} have gradients of their own, the first of shape "
            f"{tuple(others[0].shape)}; clip them apart: the optimizer, and the others"
        )
    given = {id(p) for p in held}
    return [s for owner in owners for s in owner.shards if id(s.parameter) in given]


def _norm(parts: Sequence[NormTerm], norm_type: float, group: Group | None) -> Tensor:
    """From what each rank of the group counts."""
    is_max = norm_type == INF
    reduce = primitives.MAX if is_max else primitives.SUM
    device = _device_of(parts) if group is None else primitives.device_of(group)
    terms: list[Tensor] = []
    for part in parts:
        # offloaded shards are in host memory, and a rank may have none
        where = _device_of([part], device)
        if part.over is not None:
            where = primitives.device_of(part.over)
        power = grad_sq_norm(part.held, norm_type, where)
        if part.over is not None:
            power = primitives.all_reduce(power, part.over, reduce)
        if where != device:
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
    """Where the gradients are."""
    grads = (p.grad for part in parts for p in part.held if p.grad is not None)
    first = next(grads, None)
    return (default or torch.device("cpu")) if first is None else first.device


def grad_sq_norm(mine: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Sum of |g|^p over these gradients, or their largest |g| for p = inf; zero without any.

    A NaN among them makes the sum NaN, the largest infinite.

    0-dim on `device`, float64 on the CPU and float32 elsewhere, alike on ranks with and without
    gradients. Parameters without gradient do not count.
    """
    wide = torch.float64 if device.type == "cpu" else torch.float32
    norms: list[Tensor] = []
    for (dtype, _), grads in _alike(p.grad for p in mine if p.grad is not None and p.grad.numel()):
        # in the bits of a half a norm would be rounded, or too large
        own = torch.float32 if dtype in _HALVES else None
        found = torch._foreach_norm(grads, norm_type, dtype=own)
        norms += [norm.to(device, wide) for norm in found]
    if not norms:
        return torch.zeros((), dtype=wide, device=device)
    every = torch.stack(norms)
    if norm_type == INF:
        # not every backend's maximum keeps a NaN; all of them keep infinity
        return every.nan_to_num(nan=INF, posinf=INF).max()
    return (every**norm_type).sum()


def scale_gradients(parameters: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply all gradients by a 0-dim factor on their device, rounded once, to their own bits."""
    for (dtype, device), grads in _alike(p.grad for p in parameters if p.grad is not None):
        own = factor.to(device)
        if dtype not in _HALVES:
            torch._foreach_mul_(grads, own.to(dtype))
            continue
        for grad in grads:
            # a 0-dim factor would be rounded to a half first, to zero where the norm is large
            torch.mul(grad, own.float().view([1] * grad.dim()), out=grad)


def _alike(
    grads: Iterable[Tensor],
) -> Iterable[tuple[tuple[torch.dtype, torch.device], list[Tensor]]]:
    """By dtype and device, which torch's foreach functions do not mix as one would want."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for grad in grads:
        found.setdefault((grad.dtype, grad.device), []).append(grad)
    return found.items()
