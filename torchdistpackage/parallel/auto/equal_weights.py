"""Give equal weights to the ranks that are about to split them."""

import torch
from torch import nn

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto.reporting import LOG


@torch.no_grad()
def equalise(module: nn.Module, group: Group) -> None:
    """Set the parameters and buffers of all ranks to those of the group's first, if they differ.

    Differently seeded ranks draw different weights, and slices of different weights make no model.

    Raises:
        LayoutError: the ranks' modules are not built alike.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    built = {name: (str(t.dtype), tuple(t.shape), t.is_meta) for name, t in tensors.items()}
    # float64 keeps sums of many values apart that differ in one
    sums = {n: float(t.double().abs().sum()) for n, t in tensors.items() if not t.is_meta}
    every = collectives.gather_objects((built, sums), group)
    first_built, first_sums = every[0]
    for rank, (other, _) in enumerate(every):
        if other != first_built:
            names = [n for n in {**other, **first_built} if other.get(n) != first_built.get(n)]
            raise LayoutError(
                f"rank {rank} of the group has a module that is not that of rank 0: "
                f"{', '.join(f'{n} {other.get(n)} and {first_built.get(n)}' for n in names[:3])}; "
                f"build the same module on all ranks"
            )
    if any(other != first_sums for _, other in every):
        LOG.warning(
            "the ranks of a tensor group had different weights, so all take those of the first rank"
        )
        for tensor in tensors.values():
            if not tensor.is_meta and tensor.numel():
                tensor.copy_(collectives.broadcast(tensor.detach().clone(), group))
