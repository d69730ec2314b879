"""The micro-batches that pipe ranks hold under each schedule, from published formulas. No torch."""

from functools import lru_cache

from torchdistpackage.predict.step import Ordered
from torchdistpackage.schedule.engine import TaskGraph
from torchdistpackage.schedule.generators import computations

THERE_AND_BACK = frozenset({"zb-v", "dualpipe-v"})
"""Schedules whose second stages run back over the ranks."""
ONE_BACKWARD = frozenset({"gpipe", "1f1b", "interleaved", "looped-bfs"})
"""Schedules with an undivided backward; the others compute the gradients of weights separately."""

Live = tuple[tuple[int, ...], ...]
"""Moments of a rank: for each of its stages the micro-batches that wait for their backward, and
then for each those whose inputs have their gradients and whose weights have not."""


def placement_of(schedule: str, pipe: int, chunks: int) -> tuple[int, ...]:
    """Return the pipe rank of each stage, without the order of a schedule."""
    if schedule in THERE_AND_BACK:
        return (*range(pipe), *reversed(range(pipe)))
    return tuple(range(pipe)) * chunks


@lru_cache(maxsize=4096)
def live_of(schedule: str, pipe: int, microbatches: int, chunks: int) -> tuple[Live, ...]:
    """Return, for each rank, moments before a backward at which it holds most.

    The schedule must be published for its numbers. Other moments may be equally full."""
    m, p, ranks = microbatches, pipe, range(pipe)
    match schedule:
        case "gpipe" | "looped-bfs":
            return (((m,) * chunks + (0,) * chunks,),) * p
        case "1f1b":
            return tuple(((min(m, p - r), 0),) for r in ranks)
        case "zb-h1":
            return tuple(((min(m, p - r), min(max(m - p + r, 0), r)),) for r in ranks)
        case "zb-h2":
            return tuple(((2 * (p - r) - 1, 2 * r),) for r in ranks)
        case "zb-v":
            return tuple(
                ((2 * p - 1 - r, 1 + r, 0, 0), (2 * p - r, r, 0, 0), (p - r, 0, r, r))
                for r in ranks
            )
        case "dualpipe-v":
            return tuple(
                ((2 * p - r, 1 + r, 0, 0), (p - r, 0, r // 2, (r + 1) // 2)) for r in ranks
            )
        case "interleaved":
            return tuple((_interleaved(m, p, chunks, r, 0),) for r in ranks)
        case _:
            return tuple((_interleaved(m, p, chunks, r, r),) for r in ranks)


def _interleaved(m: int, pipe: int, chunks: int, rank: int, deferred: int) -> tuple[int, ...]:
    """Return what a rank of an interleaved order holds after its warm-up and some backwards of its
    last stage, before the gradients of the weights."""
    forwards = min(2 * (pipe - rank - 1) + (chunks - 1) * pipe + 1 + deferred, m * chunks)
    groups, remainder = divmod(forwards, pipe * chunks)
    num_forwards = [
        pipe * groups + min(max(remainder - pipe * chunk, 0), pipe) for chunk in range(chunks)
    ]
    num_forwards[-1] -= deferred
    return (*num_forwards, *(0,) * (chunks - 1), deferred)


@lru_cache(maxsize=64)
def ordered(schedule: str, pipe: int, microbatches: int, chunks: int) -> Ordered:
    """Return the placement of a schedule, and its order as task numbers of a graph."""
    actions = computations(schedule, pipe, microbatches, chunks)
    return Ordered(actions.placement, TaskGraph(actions.placement, microbatches).order(actions))
