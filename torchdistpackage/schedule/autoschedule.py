"""An order made for measured costs and a memory cap: never longer than the best stock one.

Candidates are the stock orders, each as it is, with all backwards split and with none; the best
list-scheduled one; and what local search makes of the best (`order_search.py`). The shortest that
fits is taken, of several as short the one that holds least.
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
"""Computations to time in local improvement, about half a second."""


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
    """The shortest order found for `costs`, with its messages, fused and checked.

    The same arguments give the same order, on every rank and machine. It is named `auto`, or
    `auto:NAME` where no better one was found than the stock order of that name.

    placement: for each stage its rank. None: the better of round and round (`interleaved`) and down
        and up (`zb-v`).
    memory_cap: what a rank may hold, one number for all or one a rank. Each microbatch of each
        stage counts from its F to its B, or W if split: as 1, or as its number in stage_bytes.
        None: twice what 1F1B's first rank holds, more only for a stock order that is shorter.

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
        raise ScheduleError(f"{NAME}: bytes of {len(weights)} stages for {num_stages} stages")
    works = [TaskGraph(p, num_microbatches, costs, weights) for p in placements]
    _, name, order, work = _shortest([_best(work, chunks, memory_cap) for work in works])
    return lower(work.schedule(name, order), costs)


Found = tuple[float, str, Order, TaskGraph]
"""Makespan, name and order of a candidate, and the work that it orders."""


def _shortest(found: Sequence[Found]) -> Found:
    """The order, of the shortest ones, whose fullest rank holds least; then the first."""
    longest = min(length for length, *_ in found) * (1 + 1e-9)
    tied = [candidate for candidate in found if candidate[0] <= longest]
    return min(tied, key=lambda f: max(f[3].held(f[2])))


def _best(work: TaskGraph, chunks: int, cap: float | Sequence[float] | None) -> Found:
    """The best on one placement."""
    capacity = _capacity(work, cap)
    listed = rule_search(work, capacity)
    candidates: list[Found] = [
        (work.makespan(order), name, order, work)
        for name, order in _stock(work, chunks)
        if cap is None or _fits(work.held(order), capacity)
    ]
    # Of two alike the first: a stock one, which has a known name, before what was found.
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


def _fits(held: Sequence[float], limits: Sequence[float]) -> bool:
    return all(now <= limit * (1 + 1e-9) for now, limit in zip(held, limits, strict=True))


def _stock(work: TaskGraph, chunks: int) -> Iterator[tuple[str, Order]]:
    """Every stock order on this placement: as it is, with no backward split, with all split."""
    schedules = [g(work.num_ranks, work.num_microbatches, chunks) for g in GENERATORS.values()]
    known: list[Order] = []
    # Degraded ones last: most are another one's order under a longer name.
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
            if variant not in known:
                known.append(variant)
                yield name, variant


def _none_split(work: TaskGraph, order: Order) -> Order:
    """The order with a B where it has an I, and no W."""
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
    """The order with an I and at once its W where it has a B."""
    size = work.size

    def split(number: int) -> tuple[int, ...]:
        if number // size != BACKWARD:
            return (number,)
        return number - size * (BACKWARD - INPUT), number - size * (BACKWARD - WEIGHT)

    return [[part for number in program for part in split(number)] for program in order]


def _capacity(work: TaskGraph, cap: float | Sequence[float] | None) -> tuple[float, ...]:
    """Microbatches that each rank may hold, at most all that there are."""
    once = work.room()
    everything = [x * work.num_microbatches for x in once]
    given = list(cap) if isinstance(cap, Sequence) else [cap] * work.num_ranks
    if cap is None:
        given = [2 * work.num_ranks * x for x in once]
    if len(given) != work.num_ranks:
        raise ScheduleError(f"{NAME}: memory caps of {len(given)} ranks for {work.num_ranks} ranks")
    return tuple(map(min, given, everything))  # type: ignore[arg-type]
