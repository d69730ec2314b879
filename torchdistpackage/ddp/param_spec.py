"""A parameter and the ranks with which it shares its gradient."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.ddp.bucket_plan import BucketEntry


@dataclass(frozen=True)
class ParamSpec:
    """A parameter whose gradient is summed over `group`, then divided by `divide`.

    deferred: after all others, when the step's messages have gone. So it must be with a weight that
    several stages hold: a sum that one of them begins before it has sent what the other still
    waits for stops both, on one group always and on two where a device runs one after another.
    sparse_rows: few rows of the gradient are not zero, so it travels as these (sparse_grads.py), in
    no bucket.
    """

    name: str
    parameter: nn.Parameter
    group: Group
    divide: int = 1
    deferred: bool = False
    sparse_rows: bool = False

    @property
    def key(self) -> Hashable:
        """Gradients with equal keys may travel in one bucket."""
        p = self.parameter
        alone = self.name if self.sparse_rows else ""
        return p.dtype, p.device, ranks_of(self.group), self.divide, self.deferred, alone

    @property
    def is_early(self) -> bool:
        """Whether its bucket may leave while the backward runs."""
        return not (self.deferred or self.sparse_rows)

    @property
    def sum_dtype(self) -> torch.dtype:
        """In which gradients are added up: fp32 for narrower floats."""
        dtype = self.parameter.dtype
        return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype

    @property
    def is_wider(self) -> bool:
        """Whether gradients are added up in another dtype than the parameter's."""
        return self.sum_dtype != self.parameter.dtype

    def entry(self, index: int) -> BucketEntry:
        """What a plan of buckets needs to know of it."""
        num = 0 if self.sparse_rows else self.parameter.numel()
        return BucketEntry(index, num, self.sum_dtype.itemsize, self.key)

    def view(self, flat: Tensor, offset: int) -> Tensor:
        """The part of a bucket from `offset` on, with the parameter's own strides if dense."""
        like = torch.empty_like(self.parameter, device="meta")
        return flat.as_strided(like.shape, like.stride(), offset)
