"""The group of the ranks that share a node.

One rule: None means that there is one node, so that its group is the default group, which is also
what None means to the optimizers that take such a group.
"""

import torch.distributed as dist

from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import LaunchError, TopologyError
from torchdistpackage.topology.mesh import whole_size


def setup_node_groups(num_per_node: int = 8) -> Group | None:
    """My node's group where ranks fill nodes in order, `num_per_node` each; None on one node.

    All ranks call it. Where tpc is set up the group is one of its, shared and ended with them.

    Raises:
        LaunchError: torch.distributed is not initialised.
        TopologyError: the nodes would not be equally full.
    """
    if not dist.is_initialized():
        raise LaunchError("setup_node_groups needs ranks; call setup_distributed() first")
    size, world_size, rank = (
        whole_size("node", num_per_node),
        dist.get_world_size(),
        dist.get_rank(),
    )
    if world_size <= size:
        return None
    if world_size % size:
        raise TopologyError(
            f"{world_size} ranks do not fill nodes of {size} ranks each: {world_size % size} would "
            f"be left over; set num_per_node to a divisor of {world_size}, or start a multiple of "
            f"{size} ranks"
        )
    first = rank - rank % size
    groups = tpc.groups if tpc.is_set else Groups(rank)
    return groups.of(range(first, first + size), name=f"node {first // size}")
