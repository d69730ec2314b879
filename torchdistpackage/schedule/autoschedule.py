"""A search for an order that suits measured costs and a memory cap, never longer than stock orders.

The candidates are the stock orders, each as it is, with all backwards split and with none; the best
list-scheduled order; and the results of local search from the best (`order_search.py`). It chooses
the shortest that fits, and among equally short ones the one that holds the least memory.
"""

from collections.abc import Iterator, Sequence

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.engine import BACKWARD, INPUT, WEIGHT, Order, TaskGraph
from torchdistpackage.schedule.generators import GENERATORS
from torchdistpackage.schedule.list_scheduling import merge_backward
from torchdistpackage.schedule.order_search import local_search, rule_search
from torchdistpackage.schedule.orders import looped, zigzag
from torchdistpackage.schedule.passes import lower

NAME = "auto"

_TRIALS = 300_000
"""Number of computations to time in local search, about half a second."""


def synthesize(
    num_ranks: int,
    num_microbatches: int,
    costs: StageCosts,
    *,
    chunks: int = 1,
    placement: Sequence[int] | None = None,
    memory_cap: float | Sequence[float] | None = None,
    stage_bytes: Sequence[float] | None = None,
) -> Schedule:
    """Return the shortest order found for `costs`, with its messages, fused and checked.

    The same arguments give the same order on every rank and machine. It is named `auto`, or
    `auto:NAME` if the search found nothing better than the stock order of that name.

    placement: for each stage its rank. None: the better of looped (`interleaved`) and zigzag
        (`zb-v`).
    memory_cap: limit on what a rank holds, one number for all or one a rank. Each micro-batch of
        each stage counts from its F to its B, or W if split: as 1, or as its number in stage_bytes.
        None: twice what 1F1B's first rank holds, and more only for a stock order that is shorter.

    Raises:
        ScheduleError: a count below 1; costs, placement or bytes of another number of stages; a
            cap that does not even hold one microbatch of each stage of a rank.
    """
    num_stages = num_ranks * chunks
    if min(num_ranks, num_microbatches, chunks) < 1:
        raise ScheduleError(
            f"{NAME}: {num_ranks} ranks, {num_microbatches} microbatches, {chunks} chunks; use 1 "
            f"or more of each"
        )
    placements = sorted({looped(num_ranks, chunks), zigzag(num_ranks, chunks)})
    if placement is not None:
        placements = [tuple(placement)]
        if len(placement) != num_stages or set(placement) != set(range(num_ranks)):
            raise ScheduleError(
                f"{NAME}: placement {placements[0]} must name a rank of 0 to {num_ranks - 1} for "
                f"each of {num_stages} stages, and every rank"
            )
    weights = None if stage_bytes is None else tuple(stage_bytes)
    if weights is not None and len(weights) != num_stages:
        raise ScheduleError(
            f"{NAME}: bytes of {len(weights)} stages for {num_stages} stages; give one number for "
            "each stage"
        )
    works = [TaskGraph(p, num_microbatches, costs, weights) for p in placements]
    _, name, order, work = _shortest([_best(work, chunks, memory_cap) for work in works])
    return lower(work.schedule(name, order), costs)


Candidate = tuple[float, str, Order, TaskGraph]
"""Makespan, name and order of a candidate, and its task graph."""


def _shortest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the shortest candidate; among equal ones that whose fullest rank holds least."""
    longest = min(length for length, *_ in candidates) * (1 + 1e-9)
    tied = [candidate for candidate in candidates if candidate[0] <= longest]
    return min(tied, key=lambda c: max(c[3].held(c[2])))


def _best(work: TaskGraph, chunks: int, cap: float | Sequence[float] | None) -> Candidate:
    """Return the best order on one placement."""
    capacity = _capacity(work, cap)
    listed = rule_search(work, capacity)
    candidates: list[Candidate] = [
        (work.makespan(order), name, order, work)
        for name, order in _stock(work, chunks)
        if cap is None or _fits(work.held(order), capacity)
    ]
    # The sort is stable, so of two equally long orders a stock one with its name comes first.
    candidates.append((work.makespan(listed), NAME, listed, work))
    candidates.sort(key=lambda c: c[0])
    trials = _TRIALS // (3 * work.size)
    for length, _, order, _ in candidates[:2]:
        limits = [max(*pair) for pair in zip(work.held(order), capacity, strict=True)]
        better = local_search(
            work, order, lambda o, limits=limits: _fits(work.held(o), limits), trials // 2
        )
        if work.makespan(better) < length:
            candidates.append((work.makespan(better), NAME, better, work))
    return _shortest(candidates)


def _fits(peaks: Sequence[float], limits: Sequence[float]) -> bool:
    """Return whether no rank holds more than its limit, up to rounding."""
    return all(peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks, limits, strict=True))


def _stock(work: TaskGraph, chunks: int) -> Iterator[tuple[str, Order]]:
    """Yield every stock order on this placement: as it is, with no backward split, with
    all split.
    """
    schedules = [g(work.num_ranks, work.num_microbatches, chunks) for g in GENERATORS.values()]
    yielded: list[Order] = []
    # Degraded orders (`~`) come last, because most equal another order under a longer name.
    for schedule in sorted(schedules, key=lambda s: "~" in s.name):
        if schedule.placement != work.placement or not schedule.has_backward:
            continue
        order = work.order(schedule)
        split = _all_split(work, order)
        for name, variant in (
            (f"{NAME}:{schedule.name}", order),
            (NAME, _none_split(work, order)),
            (NAME, split),
            (NAME, merge_backward(work, split)),
        ):
            if variant not in yielded:
                yielded.append(variant)
                yield name, variant


def _none_split(work: TaskGraph, order: Order) -> Order:
    """Return the order with a B for each I, and without W."""
    size = work.size
    return [
        [
            number + size * (BACKWARD - INPUT) if number // size == INPUT else number
            for number in program
            if number // size != WEIGHT
        ]
        for program in order
    ]


def _all_split(work: TaskGraph, order: Order) -> Order:
    """Return the order with each B replaced by an I and its W right after."""
    size = work.size

    def split(number: int) -> tuple[int, ...]:
        if number // size != BACKWARD:
            return (number,)
        return number - size * (BACKWARD - INPUT), number - size * (BACKWARD - WEIGHT)

    return [[part for number in program for part in split(number)] for program in order]


def _capacity(work: TaskGraph, cap: float | Sequence[float] | None) -> tuple[float, ...]:
    """Return the memory that each rank may hold, at most that of all micro-batches."""
    one_microbatch = work.room()
    all_microbatches = [x * work.num_microbatches for x in one_microbatch]
    caps = list(cap) if isinstance(cap, Sequence) else [cap] * work.num_ranks
    if cap is None:
        caps = [2 * work.num_ranks * x for x in one_microbatch]
    if len(caps) != work.num_ranks:
        raise ScheduleError(
            f"{NAME}: memory caps of {len(caps)} ranks for {work.num_ranks} ranks; give one cap "
            "for each rank"
        )
    return tuple(map(min, caps, all_microbatches))  # type: ignore[arg-type]
