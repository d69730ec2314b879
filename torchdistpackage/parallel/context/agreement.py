"""What the ranks of a group must agree on before they exchange anything."""

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.errors import LayoutError


def agree(facts: dict[str, int], group: Group) -> tuple[int, ...]:
    """The first of `facts` on every rank of the group; the others are the same on all.

    Raises:
        LayoutError: they are not; on every rank, with what each has.
    """
    mine = torch.tensor([list(map(int, facts.values()))], dtype=torch.int64, device="cpu")
    rows = primitives.all_gather(mine, on_cpu(group)).tolist()
    ranks, problems = ranks_of(group), []
    for name, *column in list(zip(facts, *rows, strict=True))[1:]:
        if len(set(column)) > 1:
            held = ", ".join(f"rank {r} has {n}" for r, n in zip(ranks, column, strict=True))
            problems.append(f"{name}: {held}")
    if problems:
        raise LayoutError(
            f"the ranks of a context group must attend alike, but differ in {'; '.join(problems)}"
        )
    return tuple(row[0] for row in rows)
