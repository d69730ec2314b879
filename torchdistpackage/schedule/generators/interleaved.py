"""Orders with whole backwards and several stages a rank: interleaved 1F1B and looped BFS.

Stage s is on rank s mod p, so a microbatch goes round the ranks once for each chunk. The pipe
fills in as many steps as with one stage a rank, but of shorter ones.
"""

from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.engine import TaskGraph
from torchdistpackage.schedule.generators.warmup_steady import even_groups, looped, warmup_steady


def interleaved(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """1F1B over groups of p microbatches (Megatron-LM, arXiv:2104.04473, section 2.2).

    Rank r of p runs 2 (p - r - 1) + (v - 1) p + 1 forwards before its first backward and never
    holds more. Published for m a multiple of p; for another m (`~uneven`) some groups are larger,
    and the second p in the formula is the size of the first. One chunk is 1F1B.
    """
    if chunks == 1:
        name = "interleaved~1f1b"
    else:
        name = "interleaved~uneven" if num_microbatches % num_ranks else "interleaved"
    return megatron(name, num_ranks, num_microbatches, chunks)


def looped_bfs(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Breadth-first pipeline parallelism (arXiv:2211.05953): a stage runs all that it has in a row.

    Every stage holds all microbatches at its peak. One chunk is GPipe.
    """
    name = "looped-bfs" if chunks > 1 else "looped-bfs~gpipe"
    return breadth_first(name, num_ranks, num_microbatches, chunks)


def breadth_first(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Stage by stage all forwards, then, from the last stage, all backwards."""
    work = TaskGraph(looped(num_ranks, chunks), num_microbatches)
    return work.schedule(name, warmup_steady(work, [num_microbatches * chunks] * num_ranks))


def megatron(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """What `interleaved` says, under any name."""
    work = TaskGraph(looped(num_ranks, chunks), num_microbatches)
    groups = even_groups(num_microbatches, num_ranks)
    ahead = megatron_ahead(num_ranks, chunks, groups)
    return work.schedule(name, warmup_steady(work, ahead, groups=groups))


def megatron_ahead(num_ranks: int, chunks: int, groups: list[int]) -> list[int]:
    """For each rank the forwards before its first backward.

    The first group goes through all chunks but the last. Then, until a forward that leaves here
    is back as a gradient, a rank runs two for each rank behind it: that forward and one more.
    """
    if chunks == 1:
        return [num_ranks - r for r in range(num_ranks)]
    return [2 * (num_ranks - r - 1) + (chunks - 1) * groups[0] + 1 for r in range(num_ranks)]
