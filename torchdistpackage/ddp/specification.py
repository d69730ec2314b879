"""What NaiveDDP computes, in the plainest way: gradients are averaged after the backward.

The tests hold both equal. Nothing here overlaps, packs or hooks anything.
"""

import torch
from torch import nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group


class Specification(nn.Module):
    """Wrap `module`; after each backward whose gradients count, call `average()`."""

    def __init__(self, module: nn.Module, group: Group | None = None):
        super().__init__()
        self.module, self.group = module, resolve_group(group, "data")
        for tensor in [*module.parameters(), *module.buffers()]:
            primitives.broadcast(tensor.detach(), self.group)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def average(self) -> None:
        """Every gradient becomes its mean over the group; a rank without one counts as zero."""
        for parameter in self.module.parameters():
            is_used = parameter.grad is not None
            used = torch.tensor([is_used], dtype=torch.int32, device=parameter.device)
            if parameter.requires_grad and primitives.all_reduce(used, self.group).item():
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                grad = grad.detach().to_dense() if grad.is_sparse else grad.detach()
                mean = primitives.all_reduce(grad.clone(), self.group) / self.group.size()
                parameter.grad = mean
