"""Reference implementations of NaiveDDP and ZeroOptimizer, written in the plainest way.

Nothing here overlaps, packs or hooks anything. Tests compare NaiveDDP and ZeRO stage 1 with them.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group


class ReferenceDDP(nn.Module):
    """Data parallelism by hand: wrap `module`, and call `average()` after the last backward."""

    def __init__(self, module: nn.Module, group: Group | None = None):
        super().__init__()
        self.module, self.group = module, resolve_group(group, "data")
        for tensor in [*module.parameters(), *module.buffers()]:
            primitives.broadcast(tensor.detach(), self.group)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def average(self) -> None:
        """Replace every gradient by its mean over the group; a missing gradient counts as zero."""
        for parameter in self.module.parameters():
            is_used = parameter.grad is not None
            used = torch.tensor([is_used], dtype=torch.int32, device=parameter.device)
            # read on the host: all ranks must agree whether the next all-reduce takes place
            if parameter.requires_grad and primitives.all_reduce(used, self.group).item():
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                grad = grad.detach().to_dense() if grad.is_sparse else grad.detach()
                mean = primitives.all_reduce(grad.clone(), self.group) / self.group.size()
                parameter.grad = mean


class ReferenceZero1:
    """ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054): each rank updates 1/N of the model.

    All parameters lie in one flat tensor, which is cut evenly. A rank's optimizer has one
    parameter, its shard, and so it keeps state for that shard alone.

    parameters: parameters of one dtype and device, equal on all ranks.
    optimizer_fn: creates an element-wise optimizer for a list of parameters, for example
        `torch.optim.AdamW`.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer_fn: Callable[[list[nn.Parameter]], Optimizer],
        group: Group | None = None,
    ):
        self.parameters, self.group = list(parameters), resolve_group(group, "data")
        self.shard = nn.Parameter(self._own_shard([p.detach() for p in self.parameters]))
        self.optimizer = optimizer_fn([self.shard])

    def step(self) -> None:
        """Average the gradients of all ranks, update this rank's shard, and gather all shards."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        total = [primitives.all_reduce(grad.clone(), self.group) for grad in grads]
        self.shard.grad = self._own_shard(total) / self.group.size()
        self.optimizer.step()
        flat = primitives.all_gather(self.shard.detach(), self.group)
        start = 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            with torch.no_grad():
                parameter.copy_(flat[start:stop].view_as(parameter))
            start = stop

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _own_shard(self, tensors: list[Tensor]) -> Tensor:
        """Return this rank's shard of the flat tensor, which zeros pad to equal shards."""
        flat, size = torch.cat([x.flatten() for x in tensors]), self.group.size()
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % size)])
        return flat.view(size, -1)[self.group.rank()].clone()
