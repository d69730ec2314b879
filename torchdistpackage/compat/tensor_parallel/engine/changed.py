"""Find the weight of a split module that is no longer that of the module it was made from."""

from typing import Any

import torch
from torch import Tensor, nn

from torchdistpackage.parallel.auto.saving import PartsOf, tensors_by_any_name
from torchdistpackage.parallel.auto.split_root import PartOfTensor


def changed_weight(
    split: Any, unsplit: nn.Module, casts: dict[torch.dtype, torch.dtype]
) -> str | None:
    """Return the name of a parameter or buffer whose part a shard of this process does not hold.

    casts: gets the dtype to which floating-point tensors of each dtype were moved, if all were.
    """
    parts, sources = PartsOf(split), tensors_by_any_name(unsplit)
    for entry in split._original.entries:
        source = sources.get(entry.name)
        if source is None:
            continue
        full = parts.full.get(entry.in_shard)
        for at, shard in enumerate(parts.shards):
            rank = at if split._group is None else split._group.rank()
            current = shard.get(entry.in_shard) if full is None else full
            action: PartOfTensor | None = entry.action if full is None else None
            part = source if action is None else action(source, rank=rank)
            if current is None or current.is_floating_point() != part.is_floating_point():
                return str(entry.name)
            if casts.setdefault(part.dtype, current.dtype) != current.dtype:
                return str(entry.name)
            if not equal(current, part.to(current.dtype)):
                return str(entry.name)
    return None


def equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.detach().to(b.device), b.detach())
