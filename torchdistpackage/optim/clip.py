"""The gradient norm of the whole model, on every rank, whatever the layout.

Each rank adds up what it *owns*: one owner an element over the ranks of a model, so replicated
and tied parameters count once and an empty stage adds zero. One all-reduce does the rest.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.layout.derive import owns
from torchdistpackage.layout.layout import Layout

INF = float("inf")


def clip_grad_norm_(
    parameters: nn.Parameter | Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    layouts: Sequence[Layout] | None = None,
    group: Group | None = None,
) -> Tensor:
    """Clip like torch's function of the same name, over the stages and shards of a model.

    layouts: one for each parameter, with tpc set up: shards are then counted as shards,
        replicated and tied parameters once. Without, every rank of the group holds parameters
        of its own, as the stages of a pipeline do.
    group: ranks that together hold the model; default tpc's model group.

    Returns the norm before clipping, equal on all ranks of the group. No host synchronisation
    unless `error_if_nonfinite`.

    Raises:
        RuntimeError: the norm is not finite and `error_if_nonfinite` is set, on all ranks alike.
    """
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    mine = held
    if layouts is not None:
        pairs = zip(held, layouts, strict=True)
        mine = [p for p, layout in pairs if _speaks_for(layout)]
    group = resolve_group(group, "model")
    norm = group_norm(mine, norm_type, group, held[0].device if held else torch.device("cpu"))
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the {norm_type:g}-norm of the gradients of all stages is {norm.item()}; look for "
            f"the first step with a large loss, or clip with error_if_nonfinite=False"
        )
    scale_gradients(held, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def group_norm(
    mine: Iterable[nn.Parameter], norm_type: float, group: Group, device: torch.device
) -> Tensor:
    """p-norm of the gradients that the ranks of `group` speak for, equal on all of them."""
    power = local_power(mine, norm_type, device)
    if norm_type == INF:
        return primitives.all_reduce(power, group, primitives.MAX)
    return primitives.all_reduce(power, group) ** (1.0 / norm_type)


def local_power(mine: Iterable[nn.Parameter], norm_type: float, device: torch.device) -> Tensor:
    """Sum of |g|^p over these gradients, or their largest |g| for p = inf; zero without any.

    A NaN among them makes the sum NaN, the largest infinite.

    0-dim, float64 on the CPU and float32 elsewhere. Parameters without gradient do not count.
    """
    grads = [p.grad for p in mine if p.grad is not None and p.grad.numel()]
    wide = torch.float64 if device.type == "cpu" else torch.float32
    if not grads:
        return torch.zeros((), dtype=wide, device=device)
    norms = torch.stack([norm.to(wide) for norm in torch._foreach_norm(grads, norm_type)])
    if norm_type == INF:
        # not every backend's maximum keeps a NaN; all of them keep infinity
        return norms.nan_to_num(nan=INF, posinf=INF).max()
    return (norms**norm_type).sum()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients by a 0-dim factor on their device."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor.to(grads[0].dtype))


def _speaks_for(layout: Layout) -> bool:
    """Whether this rank owns its shard among the ranks of its own model replica."""
    mesh = tpc.topology.view(layout.view)
    return owns(layout, mesh, tpc.rank, among=tpc.topology.model_axes)
