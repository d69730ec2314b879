"""How one parameter of the user's optimizer is shared out over the ranks that share it.

One rule: ranks own consecutive stretches of the flattened parameter, in group order, so that what
each holds, joined, is the parameter. Every rank knows all of this without a message, and nothing
here reads an element of it, which may be on its way.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchdistpackage.ddp.param_spec import ParamSpec


@dataclass(frozen=True)
class ParamPartition:
    """A parameter, who owns which elements, and what the inner optimizer holds here instead.

    bounds: rank i of `shared.group` owns elements bounds[i] to bounds[i + 1] of the parameter
        flattened in memory order, which is dense; one more than the group has ranks. All zero
        where frozen.
    mine: the inner optimizer's own: 1-D, or of the parameter's shape where `whole`; None where
        nothing is owned here.
    whole: one rank owns all of it, in its own shape.
    master: `mine` is a copy in another dtype and not memory of the parameter.
    """

    shared: ParamSpec
    bounds: tuple[int, ...]
    mine: nn.Parameter | None
    whole: bool = False
    master: bool = False

    @property
    def name(self) -> str:
        return self.shared.name

    @property
    def range(self) -> tuple[int, int]:
        """My elements."""
        index = self.shared.group.rank()
        return self.bounds[index], self.bounds[index + 1]

    def flat(self, value: Tensor) -> Tensor:
        """A tensor of the parameter's shape as one dim, in the parameter's memory order."""
        strides = self.shared.parameter.stride()
        if value.stride() != strides:
            room = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
            value = room.copy_(value)
        return value.as_strided((value.numel(),), (1,), value.storage_offset())

    def shaped(self, flat: Tensor) -> Tensor:
        """The reverse of `flat`."""
        parameter = self.shared.parameter
        return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())
