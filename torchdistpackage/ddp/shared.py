"""A parameter and the ranks with which it shares its gradient."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group, ranks_of


@dataclass(frozen=True)
class Shared:
    """A parameter whose gradient is summed over `group`, then divided by `divide`.

    last: after all others, when the step's messages have gone. So it must be with a weight that
    several stages hold: a sum that one of them begins before it has sent what the other still
    waits for stops both, on one group always and on two where a device runs one after another.
    """

    name: str
    parameter: nn.Parameter
    group: Group
    divide: int = 1
    last: bool = False

    @property
    def key(self) -> Hashable:
        """Gradients with equal keys may travel in one bucket."""
        p = self.parameter
        return p.dtype, p.device, ranks_of(self.group), self.divide, self.last

    def view(self, flat: Tensor, offset: int) -> Tensor:
        """The part of a bucket from `offset` on, with the parameter's own strides if dense."""
        like = torch.empty_like(self.parameter, device="meta")
        return flat.as_strided(like.shape, like.stride(), offset)
