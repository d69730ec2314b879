"""Heads shared by several ranks of a group, each of which computes a partial gradient.

The sum runs over the group that splits the parameter; each rank adds its part at the position of
its heads in the full tensor, so no separate group is needed.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.autograd import KINDS, Code, LinearMap, apply
from torchdistpackage.comm.primitives import Group
from torchdistpackage.layout.layout import HeadSplit, Layout


def copy_to_sharing(parameter: Tensor, layout: Layout, group: Group) -> Tensor:
    """Return the parameter itself; its gradient is summed over the ranks that share its heads."""
    heads = layout.heads
    if heads is None or group.size() <= heads.groups:
        return parameter
    return apply(_CopyToSharing(group, heads), parameter)


@dataclass(frozen=True, slots=True)
class _CopyToSharing:
    """A copy for each of the sharing ranks, whose backward sums their gradients."""

    group: Group
    heads: HeadSplit

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        return x.view_as(x)

    def transposed(self) -> LinearMap:
        return _SumOverSharing(self.group, self.heads)

    def code(self) -> Code:
        return "copy_to_sharing", _numbers(self.heads), None, None


@dataclass(frozen=True, slots=True)
class _SumOverSharing:
    """A sum over the sharing ranks, whose backward copies the gradient."""

    group: Group
    heads: HeadSplit

    def __call__(self, x: Tensor, calls: Any = primitives) -> Tensor:
        size = self.group.size()
        starts = sorted({self.heads.sharing_indices(size, i).start for i in range(size)})
        slot = starts.index(self.heads.sharing_indices(size, self.group.rank()).start)
        slots = x.new_zeros((len(starts), *x.shape))
        slots[slot] = x
        # a view would keep the others alive
        return calls.all_reduce(slots, self.group)[slot].clone()

    def transposed(self) -> LinearMap:
        return _CopyToSharing(self.group, self.heads)

    def code(self) -> Code:
        return "sum_over_sharing", _numbers(self.heads), None, None


def _numbers(heads: HeadSplit) -> tuple[int, ...]:
    return heads.groups, heads.members, int(heads.shared)


def _heads(groups: int, members: int, shared: int) -> HeadSplit:
    return HeadSplit(groups, members, bool(shared))


KINDS["copy_to_sharing"] = lambda group, first, second, *heads: _CopyToSharing(
    group, _heads(*heads)
)
KINDS["sum_over_sharing"] = lambda group, first, second, *heads: _SumOverSharing(
    group, _heads(*heads)
)
