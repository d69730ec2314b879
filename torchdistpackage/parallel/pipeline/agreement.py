"""Agreement of a pipeline's ranks on their next call, before anything is sent.

If one rank sees a mistake, all ranks raise it, with what each one saw. So no rank waits for a
message that never comes. Ranks compare numbers over a group for host memory, so that none waits
for a device.
"""

from collections.abc import Sequence
from zlib import crc32

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CommError, ScheduleError

Settings = tuple[tuple[str, object], ...]
"""(name, value) of everything that must be the same on all ranks."""


def agree_on_settings(group: Group, settings: Settings, problem: str) -> None:
    """Raise ScheduleError, on every rank, if settings differ or a rank has a problem."""
    gathered = primitives.gather_objects((settings, problem), on_cpu(group))
    rows: list[tuple[Settings, str]] = gathered  # type: ignore[assignment]
    if problems := by_rank([text for _, text in rows]):
        raise ScheduleError(problems)
    for values in zip(*(row for row, _ in rows), strict=True):
        if len({str(value) for _, value in values}) > 1:
            raise ScheduleError(
                f"the ranks of a pipeline got different values of {values[0][0]}: by pipe rank "
                f"{', '.join(str(value) for _, value in values)}; pass the same on all of them"
            )


class StepAgreement:
    """An exchange of what this rank is about to do; nothing may be sent before `settle`.

    num_samples: samples of this rank's inputs; 0 without tensors.
    note: numbers for the other ranks, which find them in `notes`, by pipe index, after `settle`.
    """

    def __init__(
        self,
        group: Group,
        call_name: str,
        num_samples: int,
        problem: str = "",
        note: tuple[int, int] = (0, 0),
    ):
        self._group, self._what, self._problem = on_cpu(group), call_name, problem
        self.notes: list[tuple[int, int]] = []
        row = torch.tensor(((crc32(call_name.encode()), num_samples, bool(problem), *note),))
        self._rows = primitives.all_gather(row, self._group, async_op=True)

    def settle(self) -> int:
        """Wait for the other ranks; return the samples of the batch, 0 if no rank has a tensor.

        Raises:
            CommError: on every rank: calls or numbers of samples differ, or a rank has a problem.
        """
        # the host decides by these numbers whether the step may begin
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
        samples = [row[1] for row in rows]
        if len(counts := {n for n in samples if n}) > 1:
            raise CommError(
                f"inputs of one step must have one number of samples along dim 0; by pipe rank "
                f"they have {samples} (0: no tensors)"
            )
        return counts.pop() if counts else 0


def by_rank(texts: Sequence[str]) -> str:
    """Join the texts of the pipe ranks, each once with its ranks, without empty ones."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"{_named(ranks, len(texts))}: {text}" for text, ranks in ranks_of.items())


def _named(ranks: Sequence[int], num_ranks: int) -> str:
    """Return ranks as text: `pipe rank 1`, `pipe ranks 0, 2`, `all pipe ranks`."""
    if 1 < len(ranks) == num_ranks:
        return "all pipe ranks"
    return f"pipe rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
