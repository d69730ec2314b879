"""Orders in turns: a rank runs some forwards ahead, then a backward and a forward in turn.

One rule gives most published schedules, which differ in three things: how many forwards a rank
runs before its first backward, how many backwards a W comes after its I (or whole backwards),
and how many microbatches a stage runs before the rank turns to its next one.
"""

from collections.abc import Sequence

from torchdistpackage.schedule.engine import BACKWARD, FORWARD, INPUT, WEIGHT, Order, TaskGraph


def looped(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each stage: round and round, so a microbatch passes each rank `chunks` times."""
    return tuple(range(num_ranks)) * chunks


def even_groups(num_microbatches: int, num_ranks: int) -> list[int]:
    """How many microbatches run in a row: p, or more where m is no multiple of p.

    With less than p a rank would wait for the first of a group to come round.
    """
    count = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, count)
    return [size + 1] * larger + [size] * (count - larger)


def warmup_steady(
    work: TaskGraph,
    ahead: Sequence[int],
    late: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
) -> Order:
    """The order in turns on the looped placement.

    ahead: for each rank the forwards before its first backward. late: for each rank how many
    backwards later than its I a W comes; None leaves backwards whole. groups: how many
    microbatches a stage runs in a row; None means all.
    """
    groups = groups or [work.num_microbatches]
    order: Order = []
    for rank, stages in enumerate(work.stages):
        forwards = _in_groups(work, FORWARD, stages, groups)
        first_half = BACKWARD if late is None else INPUT
        backwards = _in_groups(work, first_half, stages[::-1], groups)
        weights = [] if late is None else _in_groups(work, WEIGHT, stages[::-1], groups)
        behind = 0 if late is None else late[rank]
        program = forwards[: ahead[rank]]
        for i, backward in enumerate(backwards):
            program.append(backward)
            if i >= behind:
                program += weights[i - behind : i - behind + 1]
            program += forwards[ahead[rank] + i : ahead[rank] + i + 1]
        order.append(program + weights[max(len(backwards) - behind, 0) :])
    return order


def _in_groups(work: TaskGraph, kind: int, stages: list[int], groups: Sequence[int]) -> list[int]:
    numbers: list[int] = []
    first = 0
    for group in groups:
        for stage in stages:
            start = work.number(kind, stage, first)
            numbers += range(start, start + group)
        first += group
    return numbers
