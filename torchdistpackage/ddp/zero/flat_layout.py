"""A bucket's members side by side on one line, and the bounds between what its ranks own.

One rule: parameters and gradients lie on the same line, so one list of bounds serves the sum on
its way down and the gather on its way up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.bucket_plan import ALIGN_BYTES, Bucket
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.zero.shard_bounds import bounds_of, even_bounds


@dataclass(frozen=True)
class FlatLayout:
    """Member i begins at offsets[i]; rank r of the group owns bounds[r] to bounds[r + 1]."""

    members: tuple[ParamSpec, ...]
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


def shard_evenly(
    bucket: Bucket, members: Sequence[ParamSpec], wire: torch.dtype | None
) -> FlatLayout:
    """Every rank owns equally many elements. wire: dtype in which they travel, if another."""
    bounds = even_bounds(bucket.used_flags, members[0].group.size(), _itemsize(members, wire))
    return FlatLayout(tuple(members), bucket.offsets, bounds)


def shard_by_owner(
    members: Sequence[ParamSpec], owner_of: Mapping[str, int], wire: torch.dtype | None
) -> FlatLayout:
    """Every member belongs to one rank; owner_of: name -> index in the group. wire: as above."""
    lengths = [0] * members[0].group.size()
    places: list[int] = []  # in the slice of the owner
    step = max(1, ALIGN_BYTES // members[0].parameter.element_size())
    for shared in members:
        owner = owner_of[shared.name]
        places.append(lengths[owner])
        lengths[owner] += -(-shared.parameter.numel() // step) * step
    bounds = bounds_of(lengths, _itemsize(members, wire))
    owners = [owner_of[shared.name] for shared in members]
    offsets = tuple(bounds[owner] + at for owner, at in zip(owners, places, strict=True))
    return FlatLayout(tuple(members), offsets, bounds)


def _itemsize(members: Sequence[ParamSpec], wire: torch.dtype | None) -> int:
    """Of the narrowest dtype that slices have."""
    own = members[0].parameter.dtype
    return own.itemsize if wire is None else min(own.itemsize, wire.itemsize)
