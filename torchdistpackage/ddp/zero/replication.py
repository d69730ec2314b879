"""The groups of ranks that hold the same shard where each group of a topology shards (HSDP)."""

from typing import cast

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.errors import TopologyError


def replica_group(group: Group | None, among: Group | None = None) -> Group | None:
    """Ranks of `among` with my place in their own `group`; None where there is one group.

    They hold the same shard where each group shards: shards inside a node make the gather cheap,
    and what is summed inside a node is summed once more over the same place of all nodes.

    group: a part of `among` of equal size on each rank, such as `setup_node_groups()` gives; None
        is all of them. among: ranks that see different batches; default all.

    All ranks of `among` call it.

    Raises:
        TopologyError: the groups do not tile `among` evenly.
    """
    among = resolve_group(among, "global")
    rank = ranks_of(among)[among.rank()]
    mine = ranks_of(among if group is None else group)
    groups = sorted(set(cast(list[tuple[int, ...]], primitives.gather_objects(mine, among))))
    held = sorted(r for ranks in groups for r in ranks)
    if held != sorted(ranks_of(among)) or len({len(ranks) for ranks in groups}) > 1:
        raise TopologyError(
            f"groups {groups} do not tile ranks {ranks_of(among)} evenly, so shards have no "
            f"replicas; give every rank one group, all of one size"
        )
    if len(groups) == 1:
        return None
    place = mine.index(rank)
    made = tpc.groups if tpc.is_set else Groups(rank)
    return made.of([ranks[place] for ranks in groups], name=f"place {place} of each group")
