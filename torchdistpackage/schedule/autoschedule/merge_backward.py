"""Split backwards made whole again where the split gains nothing.

One rule: no computation starts later than before. A whole backward runs through autograd once
and keeps nothing for its second half; a split one pays only if somebody waits for the first.
"""

from torchdistpackage.schedule.engine import BACKWARD, INPUT, WEIGHT, Order, TaskGraph


def merge_backward(work: TaskGraph, order: Order, allowance: float = 0.0) -> Order:
    """The order with a B for each I whose message can wait until a W in the next place has ended.

    That W may be of another microbatch: if it takes as long, the two change places. allowance:
    how much later than it is used a message may arrive; above 0 the rule above may not hold.
    """
    size, cost, needs = work.size, work.cost, work.needs
    _, arrived = work.arrivals(order)
    latest: dict[int, float] = {}
    for program in order:
        for number in program:
            if number // size in (INPUT, BACKWARD):
                slot = work.gives[number]
                start = arrived[slot] - work.delay[slot] - cost[number]
                latest[needs[number]] = start + allowance + work.tiny
    joined: Order = []
    for program in order:
        places = {number: i for i, number in enumerate(program)}
        program = list(program)
        for i in range(len(program) - 1):
            first, second = program[i], program[i + 1]
            if first // size != INPUT or second // size != WEIGHT:
                continue
            own, whole = first + size * (WEIGHT - INPUT), first + size * (BACKWARD - INPUT)
            slot = work.gives[first]
            longer = cost[whole] - cost[first]
            if longer > cost[own] + work.tiny or cost[own] != cost[second]:
                continue
            if slot in latest and arrived[slot] + longer > latest[slot]:
                continue
            program[places[own]], places[second] = second, places[own]
            program[i], program[i + 1] = whole, _GONE
        joined.append(_by_age(work, [number for number in program if number != _GONE]))
    return joined


_GONE = -1


def _by_age(work: TaskGraph, program: list[int]) -> list[int]:
    """The program with the Ws of each stage, in the places that they have, oldest first."""
    size, m = work.size, work.num_microbatches
    weights: dict[int, list[int]] = {}
    for number in sorted(n for n in program if n // size == WEIGHT):
        weights.setdefault(number // m, []).append(number)
    turns = {stage: iter(numbers) for stage, numbers in weights.items()}
    return [next(turns[n // m]) if n // m in turns else n for n in program]
