"""What a pickle keeps of a group: its ranks, for which the process that loads it has a group."""

from collections.abc import Sequence

from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import resolve_group, tpc
from torchdistpackage.errors import CommError


def group_again(ranks: Sequence[int]) -> Group:
    """The group of these ranks, in a process that has no handle of it.

    Raises:
        CommError: nobody here made it, or this rank is not in it.
        LaunchError: torch.distributed is not initialised.
    """
    if tpc.is_set:
        return tpc.groups.of(ranks)
    everybody = resolve_group(None, "data")
    if ranks_of(everybody) == tuple(ranks):
        return everybody
    raise CommError(
        f"before it was pickled this module talked over ranks {tuple(ranks)}, the default group "
        f"has {everybody.size()}: set up tpc here, or make the module anew with a group"
    )
