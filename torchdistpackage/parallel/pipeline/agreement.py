"""The ranks of a pipeline agree on what they are about to do, before anything is sent.

One rule: a mistake that one rank can see is raised by all of them, with what each one saw, so no
rank is left waiting for a message that never comes. Numbers of the host are compared over a group
for host memory, so that no device is waited for.

Ranks that have agreed on a step either all come to its end, or those that do not refuse further
steps over the group by themselves. They cannot ask the others: what is still under way would be
taken for the answer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.companions import on_cpu
from torchdistpackage.comm.creation import PerGroup
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CommError, ScheduleError

Settings = tuple[tuple[str, object], ...]
"""(what it is, its value) of all that must be the same on all ranks."""

_interrupted: PerGroup[str] = PerGroup()
"""Groups over which a step has ended in an exception, with that exception."""


def agree_on_settings(group: Group, settings: Settings, problem: str) -> None:
    """All ranks have these settings and none has a problem.

    Raises:
        ScheduleError: on every rank, with what differs or the problems by pipe index.
    """
    seen = primitives.gather_objects((settings, problem), on_cpu(group))
    rows: list[tuple[Settings, str]] = seen  # type: ignore[assignment]
    if problems := by_rank([text for _, text in rows]):
        raise ScheduleError(problems)
    for values in zip(*(row for row, _ in rows), strict=True):
        if len({str(value) for _, value in values}) > 1:
            told = ", ".join(str(value) for _, value in values)
            raise ScheduleError(
                f"the ranks of a pipeline must be given the same {values[0][0]}; by pipe rank "
                f"they have {told}"
            )


class StepAgreement:
    """Begun when it is made; nothing may be sent before `settle`.

    what: this rank is about to do. num_samples: 0 without tensors. note: numbers for the others,
    who find them in `notes`, by pipe index, once all have settled.
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
        self._rows = primitives.start_all_gather(row, self._group)

    def settle(self) -> int:
        """Samples of the batch, 0 where no rank brings a tensor.

        Raises:
            CommError: on every rank: they do not do the same, their samples differ, or one has a
                problem of its own.
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
        return common_samples([row[1] for row in rows])


@contextmanager
def step_over(group: Group) -> Iterator[None]:
    """A step that the ranks of `group` have agreed on; a rank alone may fail and go on."""
    try:
        yield
    except BaseException as error:
        if group.size() > 1:
            _interrupted.setdefault(group, f"{type(error).__name__}: {error}")
        raise


def refuse_interrupted(group: Group) -> None:
    """Before anything is sent over `group`.

    Raises:
        CommError: a step over it ended here in an exception.
    """
    if group in _interrupted:
        raise CommError(
            f"an earlier step over this group was interrupted by {_interrupted[group]}; its "
            f"messages are lost: make a new group, and what steps over it"
        )


def is_interrupted(group: Group) -> bool:
    """A step over `group` ended here in an exception while messages were under way."""
    return group in _interrupted


def by_rank(texts: Sequence[str]) -> str:
    """What the pipe ranks say, a text of several once; those who say nothing are left out."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            ranks_of.setdefault(text, []).append(rank)
    return "; ".join(f"{_named(ranks, len(texts))}: {text}" for text, ranks in ranks_of.items())


def _named(ranks: Sequence[int], num_ranks: int) -> str:
    """`pipe rank 1`, `pipe ranks 0, 2`, `pipe ranks 1-3`, `all pipe ranks`."""
    if len(ranks) == 1:
        return f"pipe rank {ranks[0]}"
    if len(ranks) == num_ranks:
        return "all pipe ranks"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"pipe ranks {ranks[0]}-{ranks[-1]}"
    return f"pipe ranks {', '.join(map(str, ranks))}"


def common_samples(seen: list[int]) -> int:
    """The number that all who have one agree on.

    Raises:
        CommError: they do not.
    """
    known = {n for n in seen if n}
    if len(known) > 1:
        raise CommError(
            f"inputs of one step must have one number of samples along dim 0; by pipe rank they "
            f"have {seen} (0: no tensors)"
        )
    return known.pop() if known else 0
