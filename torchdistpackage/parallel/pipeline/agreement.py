"""The ranks of a pipeline agree on what they are about to do, before anything is sent.

One rule: a mistake that one rank can see is raised by all of them, with what each one saw. So
nobody is left waiting for a message that never comes. Numbers of the host are compared over a group
for host memory, so that no device is waited for.
"""

from zlib import crc32

import torch

from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import on_cpu
from torchdistpackage.comm.primitives import Group
from torchdistpackage.errors import CommError, ScheduleError

Settings = tuple[tuple[str, object], ...]
"""(what it is, its value) of all that must be the same on all ranks."""


def agree_on_settings(group: Group, settings: Settings, problem: str) -> None:
    """All ranks have these settings and none has a problem.

    Raises:
        ScheduleError: on every rank, with what differs or the problems by pipe index.
    """
    seen = primitives.gather_objects((settings, problem), on_cpu(group))
    rows: list[tuple[Settings, str]] = seen  # type: ignore[assignment]
    if texts := [f"pipe rank {i}: {text}" for i, (_, text) in enumerate(rows) if text]:
        raise ScheduleError("; ".join(texts))
    for values in zip(*(row for row, _ in rows), strict=True):
        if len({str(value) for _, value in values}) > 1:
            told = ", ".join(str(value) for _, value in values)
            raise ScheduleError(
                f"the ranks of a pipeline must be given the same {values[0][0]}; by pipe rank "
                f"they have {told}"
            )


def agree_on_step(group: Group, what: str, num_samples: int, problem: str = "") -> int:
    """Samples of the batch, 0 where no rank brings a tensor.

    what: this rank is about to do. num_samples: 0 without tensors, -1 if its tensors differ.

    Raises:
        CommError: on every rank: they do not do the same, their samples differ, or one has a
            problem of its own.
    """
    row = torch.tensor([[crc32(what.encode()), num_samples, bool(problem)]])
    rows = primitives.all_gather(row, on_cpu(group)).tolist()
    if any(row[2] for row in rows):
        texts = primitives.gather_objects(problem, on_cpu(group))
        raise CommError("; ".join(f"pipe rank {i}: {t}" for i, t in enumerate(texts) if t))
    if len({row[0] for row in rows}) > 1:
        calls = primitives.gather_objects(what, on_cpu(group))
        raise CommError(
            f"the ranks of a pipeline must make the same calls in the same order; by pipe rank "
            f"they call {', '.join(map(str, calls))}"
        )
    return common_samples([row[1] for row in rows])


def common_samples(seen: list[int]) -> int:
    """The number that all who have one agree on.

    Raises:
        CommError: they do not.
    """
    known = {n for n in seen if n}
    if -1 in known or len(known) > 1:
        raise CommError(
            f"inputs of one step must have one number of samples along dim 0; by stage they have "
            f"{seen} (0: no tensors, -1: this stage's own inputs differ)"
        )
    return known.pop() if known else 0
