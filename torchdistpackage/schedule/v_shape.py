"""Orders on the zigzag placement: ZB-V and DualPipeV, two stages a rank, first and last together.

Stages are placed down the ranks, then up again. The loss is on rank 0, so its backwards begin as
soon as the first microbatch is back, and all ranks hold alike.
"""

from collections import deque

from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.engine import FORWARD, INPUT, WEIGHT, Order, TaskGraph
from torchdistpackage.schedule.list_scheduling import (
    Rules,
    backward_first,
    deepest_first,
    list_order,
    merge_backward,
)
from torchdistpackage.schedule.one_f_one_b import interleave


def zigzag(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each stage: down, up, down and so on."""
    down = tuple(range(num_ranks))
    return tuple(r for chunk in range(chunks) for r in (down[::-1] if chunk % 2 else down))


def zb_v(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """ZB-V (Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, section 3).

    A rank holds 2 p microbatches of a stage at its peak: what 1F1B's first rank holds of stages
    twice as large. Published for two chunks and m >= 2 p. Fewer microbatches (`~short`) or more
    chunks (`~zigzag`) are list-scheduled within the same memory; one chunk is ZB-H1.
    """
    if chunks == 1:
        return interleave("zb-v~zb-h1", num_ranks, num_microbatches, 1, split=True)
    work = TaskGraph(zigzag(num_ranks, chunks), num_microbatches)
    name = _degraded("zb-v", work, chunks)
    if name != "zb-v":
        return work.schedule(name, _in_the_gaps(work, chunks * num_ranks))
    order: Order = []
    for rank in range(num_ranks):
        program = _ProgramBuilder(work, rank)
        program.run("F", 2 * (num_ranks - rank) - 1)
        program.run("fF", rank)
        program.run("fiW", num_ranks - rank)
        program.run("FIWfiW", num_microbatches - num_ranks)
        program.run("Ii", rank)
        program.run("IW", num_ranks - rank)
        order.append(program.with_all_weights())
    return work.schedule(name, merge_backward(work, order))


def dualpipe_v(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """DualPipeV: DeepSeek's DualPipe (arXiv:2412.19437, section 3.2.1) cut in half.

    As in github.com/deepseek-ai/DualPipe, without running a forward and a backward at once. A
    rank holds 2 p + 1 microbatches of a stage at its peak. Published for two chunks and
    m >= 2 p; see `zb_v` for the rest.
    """
    if chunks == 1:
        return interleave("dualpipe-v~zb-h1", num_ranks, num_microbatches, 1, split=True)
    work = TaskGraph(zigzag(num_ranks, chunks), num_microbatches)
    name = _degraded("dualpipe-v", work, chunks)
    if name != "dualpipe-v":
        return work.schedule(name, _in_the_gaps(work, chunks * num_ranks + 1))
    order: Order = []
    for rank in range(num_ranks):
        program = _ProgramBuilder(work, rank)
        behind = num_ranks - rank - 1
        program.run("F", 2 * behind)
        program.run("Ff", rank + 1)
        program.run("iWf", behind)
        program.run("FiWfIW", num_microbatches - 2 * num_ranks + rank + 1)
        program.run("iWfIW", behind)
        # Of the last backwards the second half is split: its Ws fill the gaps until the end.
        half, odd = divmod(rank + 1, 2)
        program.run("iWIW", half)
        program.run("iWI", odd)
        program.run("iI", half)
        program.run("WI", behind)
        order.append(program.with_all_weights())
    return work.schedule(name, merge_backward(work, order))


def _in_the_gaps(work: TaskGraph, capacity: int) -> Order:
    """The shortest of a few list-scheduled orders in which no rank holds more than `capacity`."""
    best: Order = []
    for priority in (deepest_first(work.num_stages), backward_first(work.num_stages)):
        order = list_order(work, Rules.unlimited(work, priority, (capacity,) * work.num_ranks))
        if not best or work.makespan(order) < work.makespan(best):
            best = order
        if work.makespan(best) <= work.lowest_makespan() + work.tiny:
            break
    return merge_backward(work, best)


def _degraded(name: str, work: TaskGraph, chunks: int) -> str:
    if chunks > 2:
        return f"{name}~zigzag"
    return f"{name}~short" if work.num_microbatches < 2 * work.num_ranks else name


class _ProgramBuilder:
    """A rank's program, written in letters, each the next microbatch of its kind.

    F and I are of the rank's first stage, f and i of its second; W is the oldest one left of
    either; a letter of which none is left is passed over.
    """

    def __init__(self, work: TaskGraph, rank: int) -> None:
        first, second = work.stages[rank]
        m = range(work.num_microbatches)
        self._numbers: list[int] = []
        self._next = {
            letter: iter([work.number(kind, stage, k) for k in m])
            for letter, kind, stage in (
                ("F", FORWARD, first),
                ("f", FORWARD, second),
                ("I", INPUT, first),
                ("i", INPUT, second),
            )
        }
        self._weights: deque[int] = deque()
        self._from_input_to_weight = work.size * (WEIGHT - INPUT)

    def run(self, letters: str, times: int) -> None:
        for letter in letters * times:
            if letter == "W":
                if self._weights:
                    self._numbers.append(self._weights.popleft())
                continue
            if (number := next(self._next[letter], None)) is not None:
                self._numbers.append(number)
                if letter in "Ii":
                    self._weights.append(number + self._from_input_to_weight)

    def with_all_weights(self) -> list[int]:
        """The numbers, and at the end what Ws are left."""
        return [*self._numbers, *self._weights]
