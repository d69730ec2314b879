"""Tensors of several devices of one process, by tensor_parallel's names in `cross_device_ops`.

Autograd follows all of them. One way serves CPUs and GPUs, so `all_cuda` chooses nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def broadcast_coalesced(
    tensors: Sequence[Tensor],
    devices: Sequence[torch.device],
    *,
    all_cuda: bool | None = None,
    **kwargs: Any,
) -> list[list[Tensor]]:
    """Return the tensors on each device: one list a device."""
    return [[x.to(device, non_blocking=True) for x in tensors] for device in devices]


def gather(
    tensors: Sequence[Tensor],
    dim: int = 0,
    destination: torch.device | None = None,
    all_cuda: bool | None = None,
) -> Tensor:
    """Return the tensors joined along `dim` on `destination`, by default the first one's device."""
    device = tensors[0].device if destination is None else destination
    return torch.cat([x.to(device) for x in tensors], dim)


def reduce_add(
    tensors: Sequence[Tensor],
    destination: torch.device | None = None,
    all_cuda: bool | None = None,
) -> Tensor:
    """Return the sum of the tensors on `destination`, by default the first one's device."""
    device = tensors[0].device if destination is None else destination
    total = tensors[0].to(device)
    for x in tensors[1:]:
        total = total + x.to(device)
    return total


def all_gather(tensors: Sequence[Tensor], all_cuda: bool | None = None) -> tuple[Tensor, ...]:
    """Return all tensors stacked, (n, ...), on the device of each."""
    return tuple(torch.stack([x.to(local.device) for x in tensors]) for local in tensors)


class NCCLAllReduceFunction:
    """The name of a function of autograd: `apply` gives the sum on each tensor's device."""

    @staticmethod
    def apply(*inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the sum, once for each input, whose gradient is the sum of theirs."""
        return tuple(reduce_add(inputs, local.device) for local in inputs)


class NCCLAllGatherFunction:
    """The name of a function of autograd: `apply` is `all_gather`."""

    @staticmethod
    def apply(*inputs: Tensor) -> tuple[Tensor, ...]:
        """Return all inputs stacked, once for each input's device."""
        return all_gather(inputs)
