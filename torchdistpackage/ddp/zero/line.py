"""A bucket's members side by side on one line, and the bounds between what its ranks own.

One rule: parameters and gradients lie on the same line, so one list of bounds serves the sum on
its way down and the gather on its way up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.buckets import ALIGN_BYTES, Bucket
from torchdistpackage.ddp.shared import Shared
from torchdistpackage.ddp.zero.cut import even_bounds


@dataclass(frozen=True)
class Line:
    """Member i begins at offsets[i]; rank r of the group owns bounds[r] to bounds[r + 1]."""

    members: tuple[Shared, ...]
    offsets: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def group(self) -> Group:
        return self.members[0].group

    @property
    def num_elements(self) -> int:
        return self.bounds[-1]

    @property
    def order(self) -> list[int]:
        """Places of the members as they follow each other."""
        return sorted(range(len(self.members)), key=lambda place: self.offsets[place])

    def mine(self, flat: Tensor) -> Tensor:
        """My slice."""
        index = self.group.rank()
        return flat[self.bounds[index] : self.bounds[index + 1]]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each member's part, in its shape."""
        return [m.view(flat, at) for m, at in zip(self.members, self.offsets, strict=True)]

    def bounds_of(self, place: int) -> tuple[int, ...]:
        """The bounds within one member: rank r owns these of its elements."""
        size, offset = self.members[place].parameter.numel(), self.offsets[place]
        return tuple(min(max(bound - offset, 0), size) for bound in self.bounds)


def cut_evenly(bucket: Bucket, members: Sequence[Shared]) -> Line:
    """Every rank owns equally many elements."""
    bounds = even_bounds(bucket.marks, members[0].group.size())
    return Line(tuple(members), bucket.offsets, bounds)


def cut_between(members: Sequence[Shared], owner_of: Mapping[str, int]) -> Line:
    """Every member belongs to one rank; owner_of: name -> index in the group."""
    offsets = [0] * len(members)
    bounds = [0]
    end = 0
    for rank in range(members[0].group.size()):
        for place, shared in enumerate(members):
            if owner_of[shared.name] == rank:
                offsets[place] = end
                step = max(1, ALIGN_BYTES // shared.parameter.element_size())
                end += -(-shared.parameter.numel() // step) * step
        bounds.append(end)
    return Line(tuple(members), tuple(offsets), tuple(bounds))
