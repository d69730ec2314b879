"""Orders with split backwards on the looped placement: ZB-H1, ZB-H2, interleaved zero bubble.

One rule: the gradient of a stage's input goes on at once, that of its weights (W) waits for a
time in which the rank would do nothing. Counted with F = I = W = 1 and free messages, all that
remains is that rank r starts r forwards late (Zero Bubble Pipeline Parallelism, arXiv:2401.10241).
"""

from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.autoschedule.list_scheduling import merge_backward
from torchdistpackage.schedule.engine import TaskGraph
from torchdistpackage.schedule.generators.one_f_one_b import interleave, looped, warmup_steady


def zb_h1(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """1F1B with W put off: s microbatches on stage s (section 2.3.1 there).

    Every rank holds p microbatches at its peak, as 1F1B's first does. Several chunks are
    interleaved zero bubble.
    """
    name = "zb-h1" if chunks == 1 else "zb-h1~interleaved"
    return interleave(name, num_ranks, num_microbatches, chunks, split=True)


def zb_h2(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Twice the warm-up of ZB-H1, W put off twice as far: no rank waits once it runs (2.3.2).

    Ranks end as late as they started, so a step alone gains nothing over ZB-H1, but the next
    one can start before the last rank ends. Every rank holds 2 p - 1 microbatches at its peak.
    Published for m >= 2 p - 1; with fewer (`~short`) ranks wait. Several chunks are interleaved
    zero bubble.
    """
    p = num_ranks
    if chunks > 1:
        return interleave("zb-h2~interleaved", p, num_microbatches, chunks, split=True)
    name = "zb-h2" if num_microbatches >= 2 * p - 1 else "zb-h2~short"
    work = TaskGraph(looped(p, 1), num_microbatches)
    order = warmup_steady(work, [2 * (p - s) - 1 for s in range(p)], [2 * s for s in range(p)])
    return work.schedule(name, merge_backward(work, order))


def interleaved_zb(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B with W put off, as in ZB-H1: r backwards of a stage on rank r.

    A rank holds (v + 1) p - 1 microbatches of a stage at its peak, as the first rank of interleaved
    1F1B. For an m that is no multiple of p (`~uneven`) see there. One chunk is ZB-H1.
    """
    if chunks == 1:
        name = "interleaved-zb~zb-h1"
    else:
        name = "interleaved-zb~uneven" if num_microbatches % num_ranks else "interleaved-zb"
    return interleave(name, num_ranks, num_microbatches, chunks, split=True)
