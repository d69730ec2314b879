"""Batch normalisation over the batches of all ranks.

Every rank normalises with the mean and variance of all batches together, as one process would,
however unevenly the batches are cut. It joins the ranks' means and variances as in Chan, Golub,
LeVeque (1983), through a differentiable collective, so the backward needs no formula of its own.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group


class SyncBatchNorm(nn.SyncBatchNorm):
    """torch's SyncBatchNorm on CUDA, and one that works on the CPU too.

    x (N, C, ...) -> the same shape; N may differ between ranks and be 0 on some. After `eval()` it
    needs no other rank. All ranks call it in the same order, in the backward too. If ranks use
    different parameters of a wrapper, give it a `process_group` of its own.

    process_group: default: tpc's data ranks, or all ranks, looked up in the first forward, also
        after unpickling. A deep copy shares it.

    Raises:
        ValueError: all ranks together have one value for each channel, or x has fewer than 2 dims.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.process_group is None:
            self.process_group = resolve_group(None, "data")
        if x.is_cuda or not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        # statistics in fp32: half precision would lose small differences of a variance
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, variance, count = _moments(wide, self.process_group)
        if count < 2:
            raise ValueError(
                f"batch norm over {count} value a channel, on all ranks together: input of shape "
                f"{tuple(x.shape)} here; train with more than one value, or call eval()"
            )
        if self.track_running_stats:
            self._follow(mean.detach(), variance.detach() * (count / (count - 1)))
        out = (wide - _on_channels(mean, x)) * _on_channels(torch.rsqrt(variance + self.eps), x)
        if self.weight is not None:
            out = out * _on_channels(self.weight, x)
        if self.bias is not None:
            out = out + _on_channels(self.bias, x)
        # computed in float32, and returned as the layers around expect it
        return out.to(x.dtype)

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics; with `momentum` None they are means over all steps."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = self.momentum
        if weight is None:
            # lerp_ takes a number of the host; torch's BatchNorm waits for it here too
            weight = 1.0 / self.num_batches_tracked.item()
        for running, current in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            # lerp_ takes one dtype, and the buffers may be narrower than the statistics
            running.lerp_(current.to(running.dtype), weight)

    def __deepcopy__(self, memo: dict) -> "SyncBatchNorm":
        memo[id(self.process_group)] = self.process_group
        other = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def __getstate__(self) -> dict:
        return self.__dict__ | {"process_group": None}


def convert_sync_batchnorm(module: nn.Module, group: Group | None = None) -> nn.Module:
    """Replace every batch norm in `module` by a `SyncBatchNorm` over `group`; return the module.

    The new modules hold the old parameters and buffers, so names and optimizers stay valid. If
    `module` itself is a batch norm, a new module is returned.
    """
    return _converted(module, group, {})


def _converted(module: nn.Module, group: Group | None, converted: dict[nn.Module, nn.Module]):
    """Convert a module and its children in place; `converted` holds the converted ones."""
    if module in converted:
        return converted[module]
    if isinstance(module, _BatchNorm):
        converted[module] = _synchronised(module, group)
        return converted[module]
    converted[module] = module
    for name, child in list(module._modules.items()):
        if child is not None:
            module._modules[name] = _converted(child, group, converted)
    return module


def _synchronised(norm: _BatchNorm, group: Group | None) -> SyncBatchNorm:
    """Return a SyncBatchNorm with the parameters and buffers of a batch norm."""
    sync = SyncBatchNorm(
        norm.num_features,
        norm.eps,
        norm.momentum,
        affine=False,
        track_running_stats=False,
        process_group=group,
    )
    sync.affine, sync.track_running_stats = norm.affine, norm.track_running_stats
    sync.weight, sync.bias = norm.weight, norm.bias
    sync.running_mean, sync.running_var = norm.running_mean, norm.running_var
    sync.num_batches_tracked, sync.training = norm.num_batches_tracked, norm.training
    return sync


def _moments(x: Tensor, group: Group) -> tuple[Tensor, Tensor, int]:
    """Return the mean and variance of each channel over all ranks, and the number of values."""
    dims = [0, *range(2, x.dim())]
    count = x.numel() // x.shape[1]
    mean = x.sum(dims) / max(count, 1)
    spread = (x - _on_channels(mean, x)).square().sum(dims)
    own_moments = torch.cat([x.new_tensor([count]), mean, spread])
    counts, means, spreads = collectives.all_gather(own_moments[None], 0, group).split(
        [1, x.shape[1], x.shape[1]], dim=1
    )
    total = counts.sum()
    total_mean = (counts * means).sum(0) / total
    between = (counts * (means - total_mean).square()).sum(0)
    return total_mean, (spreads.sum(0) + between) / total, int(total)


def _on_channels(values: Tensor, x: Tensor) -> Tensor:
    """Reshape (C,) to (1, C, 1, ...), to broadcast over x (N, C, ...)."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
