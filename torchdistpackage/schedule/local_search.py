"""Local improvement of an order: change its critical path, keep what makes it shorter.

That is the chain of computations, each of which starts the moment the one before it ends or its
message arrives, from the start of the step to its end.
"""

from collections.abc import Callable, Iterator

from torchdistpackage.schedule.engine import BACKWARD, FORWARD, INPUT, WEIGHT, Order, TaskGraph

Fits = Callable[[Order], bool]


def local_search(work: TaskGraph, order: Order, fits: Fits, trials: int) -> Order:
    """The order, shortened by up to `trials` tried changes; never longer, and only such as fit.

    Counted in trials and not in seconds, so that every rank that runs it gets the same.
    """
    best, changes = _length(work, order), _changes(work, order)
    while trials > 0 and (changed := next(changes, None)) is not None:
        trials -= 1
        length = _length(work, changed)
        if _is_shorter(length, best, work.tiny) and fits(changed):
            order, best, changes = changed, length, _changes(work, changed)
    return order


def _length(work: TaskGraph, order: Order) -> tuple[float, float]:
    """The makespan; of two alike the one whose ranks end earlier is nearer to a shorter one."""
    ends, _ = work.arrivals(order)
    return max(ends), sum(ends)


def _is_shorter(length: tuple[float, float], best: tuple[float, float], tiny: float) -> bool:
    if abs(length[0] - best[0]) > tiny:
        return length[0] < best[0]
    return length[1] < best[1] - tiny


def _changes(work: TaskGraph, order: Order) -> Iterator[Order]:
    """The order with one change to its critical path, for each change that may shorten it."""
    times = _OrderTimes(work, order)
    size = work.size
    for rank, i, at_once in times.critical():
        program = order[rank]
        kind = program[i] // size
        changed: list[list[int] | None] = []
        if at_once:
            changed.append(_swapped(work, program, i))
        if kind == BACKWARD:
            weight = program[i] - size * (BACKWARD - WEIGHT)
            split = [*program[:i], program[i] - size * (BACKWARD - INPUT), *program[i + 1 :]]
            changed += [[*split[:g], weight, *split[g:]] for g in times.gaps(rank, i)]
        if kind == WEIGHT:
            without = program[:i] + program[i + 1 :]
            changed += [
                [*without[: g - 1], program[i], *without[g - 1 :]] for g in times.gaps(rank, i)
            ]
            changed.append(_whole(work, program, i))
        for new in changed:
            if new is not None:
                yield [*order[:rank], new, *order[rank + 1 :]]


def _swapped(work: TaskGraph, program: list[int], i: int) -> list[int] | None:
    """The program with i before i - 1, unless it uses that or is the next of its kind."""
    size, m = work.size, work.num_microbatches
    before, number = program[i - 1], program[i]
    kinds = before // size, number // size
    uses_it = before % size == number % size or work.needs[number] == work.gives[before]
    alike = WEIGHT not in kinds and (kinds[0] == FORWARD) == (kinds[1] == FORWARD)
    if uses_it or (alike and before % size // m == number % size // m):
        return None
    return [*program[: i - 1], number, before, *program[i + 1 :]]


def _whole(work: TaskGraph, program: list[int], i: int) -> list[int] | None:
    """The program with the W at i joined to its I, if the full takes less than both."""
    size, cost = work.size, work.cost
    weight = program[i]
    first, full = weight - size * (WEIGHT - INPUT), weight + size * (BACKWARD - WEIGHT)
    if cost[full] >= cost[first] + cost[weight]:
        return None
    return [full if n == first else n for n in program if n != weight]


class _OrderTimes:
    """When the computations of an order start, and on what each has waited."""

    def __init__(self, work: TaskGraph, order: Order) -> None:
        self._work, self._order = work, order
        self._ends, self._arrived = work.arrivals(order)
        self._where = {
            work.gives[number]: (rank, i)
            for rank, program in enumerate(order)
            for i, number in enumerate(program)
        }

    def critical(self) -> Iterator[tuple[int, int, bool]]:
        """(rank, place, whether it starts the moment the one before ends), from the end back."""
        rank = self._ends.index(max(self._ends))
        i = len(self._order[rank]) - 1
        while True:
            start = self._start(rank, i)
            at_once = i > 0 and self._end(rank, i - 1) >= start - self._work.tiny
            yield rank, i, at_once
            need = self._work.needs[self._order[rank][i]]
            if at_once:
                i -= 1
            elif need >= 0:
                rank, i = self._where[need]
            else:
                return

    def gaps(self, rank: int, i: int) -> Iterator[int]:
        """The next place after i before which the rank waits, and its end."""
        length = len(self._order[rank])
        for place in range(i + 2, length):
            if self._start(rank, place) > self._end(rank, place - 1) + self._work.tiny:
                yield place
                break
        yield length

    def _end(self, rank: int, i: int) -> float:
        slot = self._work.gives[self._order[rank][i]]
        return self._arrived[slot] - self._work.delay[slot]

    def _start(self, rank: int, i: int) -> float:
        return self._end(rank, i) - self._work.cost[self._order[rank][i]]
