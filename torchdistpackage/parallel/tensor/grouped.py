"""The base of modules that talk over a group.

One rule: a module gets its group when it is made and keeps it. A deep copy of a module (an
average of weights, a reference model) talks over the same group, which is no value to copy.
"""

import copy
from typing import Self

from torch import nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import resolve_group


class Grouped(nn.Module):
    """A module with a `group`, and the mesh `axis` that it runs along and layouts name.

    group: None means the group of `tpc` along `axis`, or everybody where `tpc` is not set up; it is
        looked up here, once.
    """

    def __init__(self, group: Group | None = None, axis: str = "tensor"):
        super().__init__()
        self.group = resolve_group(group, axis)
        self.axis = axis

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        memo[id(self.group)] = self.group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin
