"""The layout of a bucket's parameters in flat memory, and the shards that each rank owns.

Ranks own consecutive ranges of a bucket, in group order; a shard is the part of such a range in one
parameter. So state, norms, checkpoints and the skipping of unused parameters work by parameter, as
without sharding, and every rank knows what the others own without a message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.bucket_plan import Bucket
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.ddp.sharded import ParamShard
from torchdistpackage.ddp.zero.shard_bounds import even_bounds, owned_bounds, pieces
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import mark_of, mark_parameter


@dataclass(frozen=True)
class FlatLayout:
    """A bucket's members side by side in one flat tensor.

    Member i begins at offsets[i]; rank r of the group owns bounds[r] to bounds[r + 1].
    """

    members: tuple[ParamSpec, ...]
    offsets: tuple[int, ...]
    bounds: tuple[int, ...]

    @property
    def group(self) -> Group:
        return self.members[0].group

    @property
    def num_elements(self) -> int:
        return self.bounds[-1]

    def mine(self, flat: Tensor) -> Tensor:
        """Return this rank's slice of a flat tensor."""
        index = self.group.rank()
        return flat[self.bounds[index] : self.bounds[index + 1]]

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the view of each member in a flat tensor, in the member's shape."""
        return [m.view(flat, at) for m, at in zip(self.members, self.offsets, strict=True)]

    def bounds_of(self, member: int) -> tuple[int, ...]:
        """Return bounds within one member: rank r owns elements bounds[r] to bounds[r + 1]."""
        size, offset = self.members[member].parameter.numel(), self.offsets[member]
        return tuple(min(max(bound - offset, 0), size) for bound in self.bounds)


def shard_evenly(bucket: Bucket, members: Sequence[ParamSpec], itemsize: int) -> FlatLayout:
    """Lay out a bucket so that every rank owns equally many elements.

    itemsize: bytes of an element in the narrowest dtype of its slices.
    """
    bounds = even_bounds(bucket.used_flags, members[0].group.size(), itemsize)
    return FlatLayout(tuple(members), bucket.offsets, bounds)


def shard_by_owner(
    members: Sequence[ParamSpec], owner_of: Mapping[str, int], itemsize: int
) -> FlatLayout:
    """Lay out a bucket so that every member belongs to one rank.

    owner_of: name -> index of its owner in the group. itemsize: as in `shard_evenly`.
    """
    first, owners = members[0], [owner_of[spec.name] for spec in members]
    sizes = [spec.parameter.numel() for spec in members]
    element_bytes, num_ranks = first.parameter.element_size(), first.group.size()
    offsets, bounds = owned_bounds(sizes, owners, num_ranks, element_bytes, itemsize)
    return FlatLayout(tuple(members), offsets, bounds)


def make_shards(
    layout: FlatLayout, values: Tensor, layouts: Mapping[str, Layout], whole: bool
) -> list[ParamShard]:
    """Return this rank's shards of a bucket, in memory order.

    values: the elements that this rank owns.
    """
    order = sorted(range(len(layout.members)), key=layout.offsets.__getitem__)
    offsets = [layout.offsets[member] for member in order]
    sizes = [layout.members[member].parameter.numel() for member in order]
    shards: list[ParamShard] = []
    for piece in pieces(offsets, sizes, layout.bounds, layout.group.rank()):
        member = order[piece.member]
        spec, tensor = layout.members[member], nn.Parameter(values.new_empty(0))
        layout_ = layouts.get(spec.name)
        if whole and (mark := mark_of(spec.parameter)) is not None:
            # an optimizer of whole matrices asks for the parts of other ranks
            mark_parameter(tensor, mark.layout, mark.group, mark.depth)
        shard = ParamShard(
            tensor, spec, member, piece.start, piece.stop, piece.offset, layout_, whole
        )
        shard.tensor.data = shard.view(values)
        shards.append(shard)
    return shards


def whole_shard(spec: ParamSpec, layouts: Mapping[str, Layout]) -> ParamShard:
    """Return the shard of a parameter that only this rank holds; the parameter itself is
    stepped.
    """
    p = spec.parameter
    return ParamShard(p, spec, 0, 0, p.numel(), 0, layouts.get(spec.name), True)
