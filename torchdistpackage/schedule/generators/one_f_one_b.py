"""Orders with whole backwards and one stage a rank: gpipe, 1f1b; and forwards alone.

They take any number of ranks and microbatches. Asked for several chunks a rank, gpipe and 1f1b
answer with the order of `interleaved.py` that does the same with chunks.
"""

from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.engine import FORWARD, TaskGraph
from torchdistpackage.schedule.generators.interleaved import breadth_first, megatron
from torchdistpackage.schedule.generators.warmup_steady import looped, warmup_steady


def forward_only(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Every stage runs its forwards in order: evaluation and generation."""
    work = TaskGraph(looped(num_ranks, chunks), num_microbatches)
    order = [
        [work.number(FORWARD, s, k) for s in stages for k in range(num_microbatches)]
        for stages in work.stages
    ]
    return work.schedule("forward", order)


def gpipe(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv:1811.06965).

    Every stage holds all microbatches at its peak.
    """
    name = "gpipe" if chunks == 1 else "gpipe~looped"
    return breadth_first(name, num_ranks, num_microbatches, chunks)


def one_f_one_b(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """One forward, one backward in turn (PipeDream-Flush, arXiv:2006.09503).

    Stage s of p runs p - s forwards before its first backward and never holds the activations
    of more microbatches than that.
    """
    if chunks > 1:
        return megatron("1f1b~interleaved", num_ranks, num_microbatches, chunks)
    work = TaskGraph(looped(num_ranks, 1), num_microbatches)
    return work.schedule("1f1b", warmup_steady(work, [num_ranks - s for s in range(num_ranks)]))
