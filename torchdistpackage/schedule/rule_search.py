"""The best list-scheduled order over many sets of rules, for given costs and memory.

What is tried depends on the work alone, never on the clock, so every rank finds the same. From a
few starts one preference after the other is set to its best value; the rest of the budget goes into
random changes of two at once (with a fixed seed).
"""

import math
import random
from dataclasses import replace
from typing import Any

from torchdistpackage.schedule.engine import Order, TaskGraph
from torchdistpackage.schedule.list_scheduling import (
    Rules,
    backward_first,
    deepest_first,
    list_order,
    merge_backward,
)

_BUDGET = 100_000
"""Computations to list-schedule in all, about half a second."""

_FEWEST, _MOST = 12, 300
"""Sets of rules to try, however large or small an order is."""


def rule_search(work: TaskGraph, capacity: tuple[float, ...]) -> Order:
    """The shortest order found in which no rank holds more than its capacity (see Rules); raises as
    `list_order`."""
    found = _RuleSearch(work)
    trials = min(max(_BUDGET // (3 * work.size), _FEWEST), _MOST)
    choices = _choices(work, _capacities(work, capacity))
    starts = _starts(work, choices["capacity"][0])
    for number, start in enumerate(starts, 1):
        found.coordinate_descent(start, choices, trials * number // (len(starts) + 1))
    found.random_restarts(choices, trials)
    return found.order


Choices = dict[str, list[Any]]
"""For each preference of Rules the values worth a try."""


class _RuleSearch:
    """What has been tried, and the best of it."""

    def __init__(self, work: TaskGraph) -> None:
        self._work = work
        self._lowest = work.lowest_makespan()
        self._tried: dict[Rules, float] = {}
        self._length = math.inf
        self._rules: Rules | None = None
        self.order: Order = []

    def coordinate_descent(self, rules: Rules, choices: Choices, trials: int) -> None:
        """Set one preference after the other to its best value while that gains something."""
        length = self._try(rules)
        moved = True
        while moved:
            moved = False
            for name, values in choices.items():
                for value in values:
                    if self._is_over(trials):
                        return
                    changed = replace(rules, **{name: value})
                    now = self._try(changed)
                    if now < length:
                        rules, length, moved = changed, now, True

    def random_restarts(self, choices: Choices, trials: int) -> None:
        """Set two preferences of the best at random, again and again."""
        draw = random.Random(0)
        for _ in range(2 * trials):
            if self._is_over(trials) or self._rules is None:
                return
            names = draw.sample(sorted(choices), 2)
            self._try(replace(self._rules, **{n: draw.choice(choices[n]) for n in names}))

    def _is_over(self, trials: int) -> bool:
        return len(self._tried) >= trials or self._length <= self._lowest + self._work.tiny

    def _try(self, rules: Rules) -> float:
        if rules in self._tried:
            return self._tried[rules]
        listed = list_order(self._work, rules)
        best = math.inf
        # where no rank waits for the first half, or everywhere
        for allowance in (0.0, math.inf):
            order = merge_backward(self._work, listed, allowance)
            length = self._work.makespan(order)
            best = min(best, length)
            if length < self._length:
                self._length, self._rules, self.order = length, rules, order
        self._tried[rules] = best
        return best


def _starts(work: TaskGraph, capacity: tuple[float, ...]) -> list[Rules]:
    """Everything split; nothing split, as 1F1B; and, as ZB-H1, what fills and drains the pipe."""
    num_stages = work.num_stages
    split = Rules.unlimited(work, deepest_first(num_stages), capacity)
    ends = tuple((rank, rank) for rank in work.placement)
    full = replace(split, split=((0, 0),) * num_stages, ahead=_ahead(work, 1, full=True))
    return [split, full, replace(split, split=ends, ahead=_ahead(work, 1, full=False))]


def _capacities(work: TaskGraph, capacity: tuple[float, ...]) -> list[tuple[float, ...]]:
    """What ranks may hold, little first: from what 1F1B's first rank holds to all they can."""
    least = [all_stages * work.num_ranks for all_stages in work.room()]
    scaled = [
        tuple(min(most, factor * x) for most, x in zip(capacity, least, strict=True))
        for factor in (1, 1.25, 1.5)
    ]
    return list(dict.fromkeys([*scaled, capacity]))


def _choices(work: TaskGraph, capacities: list[tuple[float, ...]]) -> Choices:
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
    """For each stage how many forwards a rank can start until a microbatch is back, or so.

    That is the way to the last stage and back over the time in which the slowest rank does one
    microbatch, times `factor`; `full`: backwards are.
    """
    c, m = work.costs, work.num_microbatches
    cycle = max(sum(c.forward[s] + c.backward[s] for s in mine) for mine in work.stages)
    ahead, way = [0] * work.num_stages, 0.0
    for s in reversed(range(work.num_stages)):
        way += c.forward[s] + (c.backward[s] if full else c.input[s])
        if s < work.num_stages - 1:
            way += 2 * work.delay[s * m]
        ahead[s] = min(m, max(1, math.ceil(factor * way / cycle - 1e-9))) if cycle else m
    return tuple(ahead)
