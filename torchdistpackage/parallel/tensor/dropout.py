"""Dropout for shared inputs and for a rank's own inputs.

If an activation is complete on every tensor rank, the masks must be equal, so they come from the
shared stream; if it is split (heads, columns, rows of a sequence), they must differ, so they come
from a fork of it. Both are reproduced when a forward is recomputed.
"""

import torch.nn.functional as F
from torch import Tensor

from torchdistpackage.comm.operators import is_traced
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.random import differ, forked_dropout
from torchdistpackage.parallel.tensor.marked import Grouped


class Dropout(Grouped):
    """Zero a part `p` of x in training and scale up the rest.

    split: x is this rank's own slice, so the masks of the group's ranks differ.
    """

    def __init__(self, p: float, *, split: bool, group: Group | None = None, axis: str = "tensor"):
        super().__init__(group, axis)
        self.p, self.split = p, split

    def extra_repr(self) -> str:
        return f"p={self.p}, split={self.split}"

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if not self.split:
            return F.dropout(x, self.p)
        if is_traced():
            return x * forked_dropout(x.shape, x, self.p, self.group.rank())
        with differ(self.group.rank(), x.device):
            return F.dropout(x, self.p)
