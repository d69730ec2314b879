"""Which gradients are not finite, and who says so.

One rule: only after it is known that some are does anybody look for names, so that the usual step
pays for one number.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.optim.clip import ShardedOptimizer


def first_nonfinite(named: Iterable[tuple[str, Tensor | None]]) -> str | None:
    """Name of the first gradient with a NaN or an infinity in it."""
    for name, grad in named:
        if grad is None:
            continue
        values = grad._values() if grad.is_sparse else grad
        if not torch.isfinite(values).all():
            return name
    return None


def nonfinite_report(mine: str | None, group: Group) -> str:
    """Who has what: one phrase for each rank of the group that names a gradient.

    All ranks of the group call it; all get the same text, the one of the lowest rank first.
    """
    where = f"rank {primitives.ranks_of(group)[group.rank()]}{_place()}"
    said = primitives.gather_objects(f"{where}: {mine}" if mine else "", group)
    lines = [str(line) for line in said if line]
    return "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more ranks" if len(lines) > 4 else "")


def named_gradients(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor | None]]:
    """(name, gradient) of what an optimizer steps, by number where nobody gave it names."""
    known: dict[int, str] = {}
    if isinstance(optimizer, ShardedOptimizer):
        known = {id(shard.tensor): shard.name for shard in optimizer.shards}
    named: list[tuple[str, Tensor | None]] = []
    for number, group in enumerate(optimizer.param_groups):
        if not isinstance(optimizer, ShardedOptimizer):
            known |= zip(map(id, group["params"]), group.get("param_names", ()), strict=False)
        for i, p in enumerate(group["params"]):
            named.append((known.get(id(p), f"parameter {i} of param group {number}"), p.grad))
    return named


def _place() -> str:
    """Where this rank stands in the mesh, if there is one."""
    if not tpc.is_set:
        return ""
    coord = tpc.topology.dense.coord(tpc.rank)
    return f" ({' '.join(f'{axis} {index}' for axis, index in coord.items())})"
