"""Agreement that the ranks of a group must reach before they exchange tensors."""

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.primitives import Group, ranks_of
from torchdistpackage.errors import LayoutError


def agree(facts: dict[str, int], group: Group) -> tuple[int, ...]:
    """Return the first of `facts` for every rank; check that the other facts are equal on all.

    Raises:
        LayoutError: a fact differs. Every rank raises it, with the value of each rank.
    """
    local = torch.tensor([list(map(int, facts.values()))], dtype=torch.int64, device="cpu")
    rows = primitives.all_gather(local, on_cpu(group)).tolist()
    ranks, problems = ranks_of(group), []
    for name, *column in list(zip(facts, *rows, strict=True))[1:]:
        if len(set(column)) > 1:
            values = ", ".join(f"rank {r} has {n}" for r, n in zip(ranks, column, strict=True))
            problems.append(f"{name}: {values}")
    if problems:
        raise LayoutError(
            "all ranks of a context group must use the same attention options, but they differ "
            f"in {'; '.join(problems)}"
        )
    return tuple(row[0] for row in rows)
