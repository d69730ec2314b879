"""The ranks of a pipeline agree on what they are about to do, before anything is sent.

A mistake that one rank can see is raised by all of them, with what each one saw, so no rank waits
for a message that never comes. Numbers of the host are compared over a group for host memory, so
that no device is waited for.
"""

from collections.abc import Sequence
from zlib import crc32

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CommError, ScheduleError

Settings = tuple[tuple[str, object], ...]
"""(what it is, its value) of all that must be the same on all ranks."""


def agree_on_settings(group: Group, settings: Settings, problem: str) -> None:
    """Raises ScheduleError, on every rank, where settings differ or a rank has a problem."""
    seen = primitives.gather_objects((settings, problem), on_cpu(group))
    rows: list[tuple[Settings, str]] = seen  # type: ignore[assignment]
    if problems := by_rank([text for _, text in rows]):
        raise ScheduleError(problems)
    for values in zip(*(row for row, _ in rows), strict=True):
        if len({str(value) for _, value in values}) > 1:
            raise ScheduleError(
                f"the ranks of a pipeline must be given the same {values[0][0]}; by pipe rank "
                f"they have {', '.join(str(value) for _, value in values)}"
            )


class StepAgreement:
    """The next step of this rank, on its way to the others; nothing may be sent before `settle`.

    num_samples: 0 without tensors. note: numbers for the others, who find them in `notes`, by pipe
    index, once all have settled.
    """

    def __init__(
        self,
        group: Group,
        what: str,
        num_samples: int,
        problem: str = "",
        note: tuple[int, int] = (0, 0),
    ):
        self._group, self._what, self._problem = on_cpu(group), what, problem
        self.notes: list[tuple[int, int]] = []
        row = torch.tensor(((crc32(what.encode()), num_samples, bool(problem), *note),))
        self._rows = primitives.all_gather(row, self._group, async_op=True)

    def settle(self) -> int:
        """Samples of the batch, 0 where no rank brings a tensor.

        Raises CommError: on every rank: calls or numbers of samples differ, or one has a problem.
        """
        rows = self._rows.wait().tolist()
        self.notes = [(row[3], row[4]) for row in rows]
        if any(row[2] for row in rows):
            texts = primitives.gather_objects(self._problem, self._group)
            raise CommError(by_rank([str(text) for text in texts]))
        if len({row[0] for row in rows}) > 1:
            calls = primitives.gather_objects(self._what, self._group)
            raise CommError(
                f"the ranks of a pipeline must make the same calls in the same order; by pipe rank "
                f"they call {', '.join(map(str, calls))}"
            )
        seen = [row[1] for row in rows]
        if len(known := {n for n in seen if n}) > 1:
            raise CommError(
                f"inputs of one step must have one number of samples along dim 0; by pipe rank "
                f"they have {seen} (0: no tensors)"
            )
        return known.pop() if known else 0


def by_rank(texts: Sequence[str]) -> str:
    """The texts of the pipe ranks, equal ones once; empty ones are left out."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"{_named(ranks, len(texts))}: {text}" for text, ranks in ranks_of.items())


def _named(ranks: Sequence[int], num_ranks: int) -> str:
    """`pipe rank 1`, `pipe ranks 0, 2`, `all pipe ranks`."""
    if 1 < len(ranks) == num_ranks:
        return "all pipe ranks"
    return f"pipe rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
