"""A search for a short order: over rules of list scheduling, and then by local changes.

The trials depend only on the work, never on the clock, so every rank finds the same order. From a
few starts the search sets one preference after another to its best value. The rest of the budget
goes into random changes of two preferences at once, with a fixed seed.

Local search changes the critical path of an order and keeps changes that shorten it. The critical
path is the chain of computations from the start of the step to its end, each of which starts the
moment the one before it ends or its message arrives.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torchdistpackage.schedule.engine import BACKWARD, FORWARD, INPUT, WEIGHT, Order, TaskGraph
from torchdistpackage.schedule.list_scheduling import (
    Rules,
    backward_first,
    deepest_first,
    list_order,
    merge_backward,
)

_BUDGET = 100_000
"""Number of computations to list-schedule in all, about half a second."""

_FEWEST, _MOST = 12, 300
"""Fewest and most sets of rules to try, for orders of any size."""


def rule_search(work: TaskGraph, capacity: tuple[float, ...]) -> Order:
    """Return the shortest order found in which no rank exceeds its capacity (see Rules).

    Raises:
        ScheduleError: as in `list_order`.
    """
    search = _RuleSearch(work)
    trials = min(max(_BUDGET // (3 * work.size), _FEWEST), _MOST)
    choices = _choices(work, _capacities(work, capacity))
    starts = _starts(work, choices["capacity"][0])
    for number, start in enumerate(starts, 1):
        search.coordinate_descent(start, choices, trials * number // (len(starts) + 1))
    search.random_restarts(choices, trials)
    return search.order


Choices = dict[str, list[Any]]
"""The values to try for each preference of Rules."""


class _RuleSearch:
    """A search over rules, with the results tried so far and the best order."""

    def __init__(self, work: TaskGraph) -> None:
        self._work = work
        self._lowest = work.lowest_makespan()
        self._tried: dict[Rules, float] = {}
        self._length = math.inf
        self._rules: Rules | None = None
        self.order: Order = []

    def coordinate_descent(self, rules: Rules, choices: Choices, trials: int) -> None:
        """Set one preference after another to its best value, as long as that shortens the
        order.
        """
        length = self._try(rules)
        moved = True
        while moved:
            moved = False
            for name, values in choices.items():
                for value in values:
                    if self._is_over(trials):
                        return
                    changed = replace(rules, **{name: value})
                    changed_length = self._try(changed)
                    if changed_length < length:
                        rules, length, moved = changed, changed_length, True

    def random_restarts(self, choices: Choices, trials: int) -> None:
        """Change two random preferences of the best rules, again and again."""
        draw = random.Random(0)
        for _ in range(2 * trials):
            if self._is_over(trials) or self._rules is None:
                return
            names = draw.sample(sorted(choices), 2)
            self._try(replace(self._rules, **{n: draw.choice(choices[n]) for n in names}))

    def _is_over(self, trials: int) -> bool:
        """Return whether the budget is spent or the lower bound reached."""
        return len(self._tried) >= trials or self._length <= self._lowest + self._work.tiny

    def _try(self, rules: Rules) -> float:
        """Return the length of the order by `rules`, and keep it if it is the best."""
        if rules in self._tried:
            return self._tried[rules]
        listed = list_order(self._work, rules)
        best = math.inf
        # join backwards where no rank waits for the first half, and then everywhere
        for allowance in (0.0, math.inf):
            order = merge_backward(self._work, listed, allowance)
            length = self._work.makespan(order)
            best = min(best, length)
            if length < self._length:
                self._length, self._rules, self.order = length, rules, order
        self._tried[rules] = best
        return best


def _starts(work: TaskGraph, capacity: tuple[float, ...]) -> list[Rules]:
    """Return three starts: all backwards split, none as in 1F1B, and the ends' as in ZB-H1."""
    num_stages = work.num_stages
    split = Rules.unlimited(work, deepest_first(num_stages), capacity)
    ends = tuple((rank, rank) for rank in work.placement)
    full = replace(split, split=((0, 0),) * num_stages, ahead=_ahead(work, 1, full=True))
    return [split, full, replace(split, split=ends, ahead=_ahead(work, 1, full=False))]


def _capacities(work: TaskGraph, capacity: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Return memory limits, smallest first: from that of 1F1B's first rank to the full capacity."""
    least = [all_stages * work.num_ranks for all_stages in work.room()]
    scaled = [
        tuple(min(most, factor * x) for most, x in zip(capacity, least, strict=True))
        for factor in (1, 1.25, 1.5)
    ]
    return list(dict.fromkeys([*scaled, capacity]))


def _choices(work: TaskGraph, capacities: list[tuple[float, ...]]) -> Choices:
    """Return the values to try for each preference."""
    m, num_stages, num_ranks = work.num_microbatches, work.num_stages, work.num_ranks
    unlimited = (m * num_stages,) * num_ranks
    ends = ((1, 0, 1, 0), (1, 0, 0, 0), (0, 0, 1, 0), (1, 1, 1, 1), (2, 0, 1, 0), (2, 0, 2, 0))
    late = ((0, 0), (1, 0), (0.5, 0), (2, 0), (-1, num_ranks), (0, num_ranks), (0, 1), (0, 2))
    return {
        "capacity": capacities,
        "split": [
            ((m, 0),) * num_stages,
            ((0, 0),) + ((m, 0),) * (num_stages - 1),
            ((0, 0),) * num_stages,
            ((0, 2),) * num_stages,
            ((2, 2),) * num_stages,
            *(
                tuple((by * r + more, by_end * r + more_end) for r in work.placement)
                for by, more, by_end, more_end in ends
            ),
        ],
        "ahead": [
            (m,) * num_stages,
            *(
                _ahead(work, factor, full=full)
                for factor in (1, 1.25, 1.5, 2, 3)
                for full in (False, True)
            ),
        ],
        "max_deferred_w": [
            unlimited,
            *(tuple(math.ceil(by * r + more) for r in range(num_ranks)) for by, more in late),
        ],
        "priority": [
            deepest_first(num_stages),
            backward_first(num_stages),
            tuple((-s, s - num_stages) for s in range(num_stages)),
            tuple((s, -s - 0.5) for s in range(num_stages)),
        ],
        "min_gap_fill": [0.5, 1.0, 0.0, 0.25, 0.75],
    }


def _ahead(work: TaskGraph, factor: float, *, full: bool) -> tuple[int, ...]:
    """Return about how many forwards a stage can start until its first micro-batch is back.

    This is the time to the last stage and back, divided by the time of one micro-batch on the
    slowest rank, times `factor`.

    full: backwards are not split.
    """
    c, m = work.costs, work.num_microbatches
    cycle = max(
        sum(c.forward[s] + c.backward[s] for s in rank_stages) for rank_stages in work.stages
    )
    ahead, round_trip = [0] * work.num_stages, 0.0
    for s in reversed(range(work.num_stages)):
        round_trip += c.forward[s] + (c.backward[s] if full else c.input[s])
        if s < work.num_stages - 1:
            round_trip += 2 * work.delay[s * m]
        ahead[s] = min(m, max(1, math.ceil(factor * round_trip / cycle - 1e-9))) if cycle else m
    return tuple(ahead)


Fits = Callable[[Order], bool]


def local_search(work: TaskGraph, order: Order, fits: Fits, trials: int) -> Order:
    """Return the order after up to `trials` tried changes, never longer, and one that fits.

    It counts trials, not seconds, so that every rank gets the same result.
    """
    best, changes = _length(work, order), _changes(work, order)
    while trials > 0 and (changed := next(changes, None)) is not None:
        trials -= 1
        length = _length(work, changed)
        if _is_shorter(length, best, work.tiny) and fits(changed):
            order, best, changes = changed, length, _changes(work, changed)
    return order


def _length(work: TaskGraph, order: Order) -> tuple[float, float]:
    """Return the makespan and, to compare equal ones, the sum of all ranks' ends."""
    ends, _ = work.arrivals(order)
    return max(ends), sum(ends)


def _is_shorter(length: tuple[float, float], best: tuple[float, float], tiny: float) -> bool:
    """Return whether a length is below `best` by more than rounding."""
    if abs(length[0] - best[0]) > tiny:
        return length[0] < best[0]
    return length[1] < best[1] - tiny


def _changes(work: TaskGraph, order: Order) -> Iterator[Order]:
    """Yield the order with one change to its critical path, for each change that may shorten it."""
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
            others = program[:i] + program[i + 1 :]
            changed += [
                [*others[: g - 1], program[i], *others[g - 1 :]] for g in times.gaps(rank, i)
            ]
            changed.append(_whole(work, program, i))
        for new in changed:
            if new is not None:
                yield [*order[:rank], new, *order[rank + 1 :]]


def _swapped(work: TaskGraph, program: list[int], i: int) -> list[int] | None:
    """Return the program with i - 1 and i swapped, or None if i needs i - 1 or must follow it."""
    size, m = work.size, work.num_microbatches
    previous, number = program[i - 1], program[i]
    kinds = previous // size, number // size
    uses_it = previous % size == number % size or work.needs[number] == work.gives[previous]
    same_direction = WEIGHT not in kinds and (kinds[0] == FORWARD) == (kinds[1] == FORWARD)
    if uses_it or (same_direction and previous % size // m == number % size // m):
        return None
    return [*program[: i - 1], number, previous, *program[i + 1 :]]


def _whole(work: TaskGraph, program: list[int], i: int) -> list[int] | None:
    """Return the program with the W at i joined to its I, or None if that costs no less."""
    size, cost = work.size, work.cost
    weight = program[i]
    first, full = weight - size * (WEIGHT - INPUT), weight + size * (BACKWARD - WEIGHT)
    if cost[full] >= cost[first] + cost[weight]:
        return None
    return [full if n == first else n for n in program if n != weight]


class _OrderTimes:
    """The start and end times of an order's computations, and its critical path."""

    def __init__(self, work: TaskGraph, order: Order) -> None:
        self._work, self._order = work, order
        self._ends, self._arrived = work.arrivals(order)
        self._where = {
            work.gives[number]: (rank, i)
            for rank, program in enumerate(order)
            for i, number in enumerate(program)
        }

    def critical(self) -> Iterator[tuple[int, int, bool]]:
        """Yield the critical path backwards: (rank, index, starts when the one before ends)."""
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
        """Yield the next index after i at which the rank waits, and the end of its program."""
        length = len(self._order[rank])
        for index in range(i + 2, length):
            if self._start(rank, index) > self._end(rank, index - 1) + self._work.tiny:
                yield index
                break
        yield length

    def _end(self, rank: int, i: int) -> float:
        slot = self._work.gives[self._order[rank][i]]
        return self._arrived[slot] - self._work.delay[slot]

    def _start(self, rank: int, i: int) -> float:
        return self._end(rank, i) - self._work.cost[self._order[rank][i]]
