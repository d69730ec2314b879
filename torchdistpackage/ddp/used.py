"""Whether every rank used every parameter, for those who want to hear of it."""

from collections.abc import Sequence

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import ranks_of
from torchdistpackage.ddp.param_spec import ParamSpec
from torchdistpackage.errors import CommError

MAX_NAMES = 20


def check_unused_parameters(shared: Sequence[ParamSpec], has_grad: Sequence[bool]) -> None:
    """Compare over each group which of its parameters got a gradient, here told by `has_grad`.

    Raises:
        CommError: some rank did not use some; on all ranks of the group, by name.
    """
    by_group: dict[tuple[int, ...], list[int]] = {}
    for i, s in enumerate(shared):
        by_group.setdefault(ranks_of(s.group), []).append(i)
    unused: list[str] = []
    for _, members in sorted(by_group.items(), key=lambda item: item[0]):
        first = shared[members[0]]
        used = torch.tensor(
            [has_grad[i] for i in members], dtype=torch.int32, device=first.parameter.device
        )
        primitives.all_reduce(used, first.group, primitives.MIN)
        unused += [
            shared[i].name for i, by_all in zip(members, used.tolist(), strict=True) if not by_all
        ]
    if unused:
        raise CommError(
            f"{len(unused)} of {len(shared)} parameters got no gradient on some rank in this step: "
            f"{', '.join(sorted(unused)[:MAX_NAMES])}; freeze them, use them, or leave strict off"
        )
