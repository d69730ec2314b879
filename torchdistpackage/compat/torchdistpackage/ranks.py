"""Lists of ranks by arithmetic alone, for code that makes its own groups.

One rule: every rank is in exactly one list. Sizes that do not tile the world raise an error and are
never rounded. New code should use a `Mesh`, which also knows the names of the axes. No
torch.
"""

import math
from collections.abc import Callable, Sequence

from torchdistpackage.errors import TopologyError
from torchdistpackage.topology.mesh import whole_size


def gen_inner_ranks(world_size: int, group_size: float) -> list[list[int]]:
    """Return groups of neighbours: 4 ranks in groups of 2 are [[0, 1], [2, 3]].

    Raises:
        TopologyError: `group_size` is not whole or does not divide `world_size`.
    """
    size = whole_size("group", group_size)
    _check_tiles(world_size, size, 1)
    return [list(range(first, first + size)) for first in range(0, world_size, size)]


def gen_groups(
    world_size: int,
    group_size: float,
    strides: Sequence[float] | None,
    hook: Callable[[list[int]], object],
) -> None:
    """Call `hook(ranks)` for each group of `group_size` ranks along one axis.

    strides: sizes of the axes inside this one; the distance between members is their product. None
    or empty: neighbours. Groups are ordered by their offset in the inner axes, then in the outer.

    Raises:
        TopologyError: a size is not whole, or the axes do not tile `world_size`.
    """
    size = whole_size("group", group_size)
    stride = math.prod(whole_size("stride", inner) for inner in strides or ())
    _check_tiles(world_size, size, stride)
    for offset in range(stride):
        for first in range(offset, world_size, size * stride):
            hook(list(range(first, first + size * stride, stride)))


def _check_tiles(world_size: int, size: int, stride: int) -> None:
    if world_size % (size * stride):
        apart = f", {stride} apart," if stride > 1 else ""
        raise TopologyError(
            f"groups of {size} ranks{apart} do not tile {world_size} ranks; "
            f"use a multiple of {size * stride} ranks, or another size"
        )
