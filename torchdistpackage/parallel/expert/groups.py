"""Who a mixture of experts talks to, found once when it is made."""

from dataclasses import dataclass

from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.comm.tpc import group_again, resolve_group, tpc
from torchdistpackage.ddp.param_spec import batch_group


@dataclass(frozen=True)
class ExpertGroups:
    """expert: ranks that share the experts. tensor: that share each expert. sequence: that each
    hold a part of every sequence. batch: that see different tokens.

    A copy of a layer talks over the same groups; a pickle keeps their ranks.
    """

    expert: Group
    tensor: Group
    sequence: Group
    batch: Group

    @staticmethod
    def found(group: Group | None, tensor_group: Group | None, axis: str) -> "ExpertGroups":
        """The given ones, else those of tpc; without tpc all ranks share the experts."""
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
    return ExpertGroups(*map(group_again, ranks))
