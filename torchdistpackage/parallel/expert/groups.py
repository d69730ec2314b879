"""The groups over which a mixture of experts communicates, resolved once when it is created."""

from dataclasses import dataclass

from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import group_again, resolve_group, tpc
from torchdistpackage.ddp.param_spec import batch_group


@dataclass(frozen=True)
class ExpertGroups:
    """The groups of a layer.

    A copy of a layer uses the same groups; a pickle keeps their ranks.

    A copy of a layer talks over the same groups; a pickle keeps their ranks.
    """

    expert: Group
    tensor: Group
    sequence: Group
    batch: Group

    @staticmethod
    def found(group: Group | None, tensor_group: Group | None, axis: str) -> "ExpertGroups":
        """Return these groups, by default those of tpc; without tpc all ranks share the experts."""
        expert = resolve_group(group, "expert")
        if tpc.is_set:
            sequence, tensor = tpc.get_group("context"), tensor_group or tpc.get_group(axis)
        else:
            rank = ranks_of(expert)[expert.rank()]
            sequence = Groups(rank).of([rank])
            tensor = tensor_group or sequence
        return ExpertGroups(expert, tensor, sequence, batch_group())

    def __deepcopy__(self, memo: dict[int, object]) -> "ExpertGroups":
        return self

    def __reduce__(self) -> tuple[object, ...]:
        groups = self.expert, self.tensor, self.sequence, self.batch
        return _again, tuple(map(ranks_of, groups))


def _again(*ranks: tuple[int, ...]) -> ExpertGroups:
    """Return the groups of these ranks, from a pickle."""
    return ExpertGroups(*map(group_again, ranks))
