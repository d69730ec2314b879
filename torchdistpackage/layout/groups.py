"""Which groups a rank makes, and in which order. Arithmetic only.

A group is made by its members alone, and each of them waits until all have come. So the order
must be the same for all: everybody, the axes in the order of the mesh, then lists of ranks in their
own order. A rank that waits for a member waits for one that is still at an earlier group, and
no one is earlier than the first, so no one waits in a circle, whatever else each rank is in.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torchdistpackage.layout.derive import BATCH_AXES, gradient_ranks, replica_ranks
from torchdistpackage.layout.layout import Layout
from torchdistpackage.topology.views import Topology

PIPE = "pipe"
"""The axis whose neighbours send each other messages."""
MODEL = "model"
"""The mode that few calls use: it connects in its first call, a collective of all its ranks."""


@dataclass(frozen=True, slots=True)
class Creation:
    """A group to make.

    connects: at once, not in its first call. neighbours: those in the ring of its ranks connect
        for messages too.
    """

    ranks: tuple[int, ...]
    connects: bool = True
    neighbours: bool = False


def creations(
    topology: Topology,
    rank: int,
    *,
    sums: Iterable[Layout] = (),
    copies: Iterable[Layout] = (),
) -> tuple[Creation, ...]:
    """All groups of `rank`, in the order in which it makes them; each list of ranks once.

    sums: layouts of parameters that this rank holds and whose gradients are summed; ranks that see
        different tokens get a group too. copies: whose replicas are compared.

    Without layouts these are the groups of the axes, and they are the first ones of the others.
    """
    wanted = [Creation(tuple(range(topology.world_size)))]
    moe = topology.expert.axis_size("expert") > 1
    for mode in (*topology.dense.names, MODEL, *(("moe_dp", "moe_ep") if moe else ())):
        ranks = tuple(topology.group(rank, mode))
        wanted.append(Creation(ranks, connects=mode != MODEL, neighbours=mode == PIPE))
    summed = {gradient_ranks(x, topology.view(x.view), rank) for x in sums}
    if summed:
        summed.add(tuple(topology.dense.group(rank, BATCH_AXES)))
    same = {replica_ranks(x, topology.view(x.view), rank) for x in copies}
    wanted += (Creation(ranks) for part in (summed, same) for ranks in sorted(part))
    found: dict[tuple[int, ...], Creation] = {}
    for one in wanted:
        before = found.get(one.ranks, Creation(one.ranks, connects=False))
        found[one.ranks] = Creation(
            one.ranks, before.connects or one.connects, before.neighbours or one.neighbours
        )
    return tuple(found.values())
