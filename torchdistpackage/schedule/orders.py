"""Orders of the named schedules, on two placements of stages.

The looped placement has GPipe and 1F1B, with chunks and with split backwards. With split backwards
(Zero Bubble Pipeline Parallelism, arXiv:2401.10241), the gradient of a stage's input is sent at
once, and the gradient of its weights (W) is computed when the rank would be idle. With F = I = W =
1 and free messages the only bubble left is that rank r starts r forwards late.

The zigzag placement has ZB-V and DualPipeV, with two stages a rank: down the ranks, then up again.
So the first and the last stage are on rank 0, which also has the loss. Its backwards start as soon
as the first micro-batch is back, and all ranks hold equal memory.

A generator takes any number of ranks, micro-batches and chunks (stages a rank). If it gives the
order of another generator for these numbers, the name says so after a `~`.
"""

from collections import deque
from collections.abc import Sequence

from torchdistpackage.layout.partition import even_sizes
from torchdistpackage.schedule.actions import Action, ActionKind, Program, Schedule
from torchdistpackage.schedule.engine import BACKWARD, FORWARD, INPUT, WEIGHT, Order, TaskGraph
from torchdistpackage.schedule.list_scheduling import (
    Rules,
    backward_first,
    deepest_first,
    list_order,
    merge_backward,
)


def looped(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each stage in rounds, so a micro-batch passes each rank `chunks` times."""
    return tuple(range(num_ranks)) * chunks


def gpipe(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Return all forwards, then all backwards (GPipe, arXiv:1811.06965).

    Every stage holds all micro-batches at its peak.
    """
    name = "gpipe" if chunks == 1 else "gpipe~looped"
    return _breadth_first(name, num_ranks, num_microbatches, chunks)


def looped_bfs(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Return breadth-first pipeline parallelism (arXiv:2211.05953): GPipe with several chunks.

    A stage runs all its forwards in a row, and holds all micro-batches at its peak.
    """
    name = "looped-bfs" if chunks > 1 else "looped-bfs~gpipe"
    return _breadth_first(name, num_ranks, num_microbatches, chunks)


def forward_only(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Return forwards only, in order on every stage, for evaluation and generation."""
    return _breadth_first("forward", num_ranks, num_microbatches, chunks, backward=False)


def _breadth_first(
    name: str, num_ranks: int, num_microbatches: int, chunks: int, *, backward: bool = True
) -> Schedule:
    """Return all forwards stage by stage and then, from the last stage, all backwards."""
    num_stages, microbatches = num_ranks * chunks, range(num_microbatches)
    programs: list[Program] = []
    for rank in range(num_ranks):
        stages = range(rank, num_stages, num_ranks)
        forwards = [Action(s, ActionKind.F, m) for s in stages for m in microbatches]
        backwards = [Action(s, ActionKind.B, m) for s in reversed(stages) for m in microbatches]
        programs.append((*forwards, *backwards) if backward else tuple(forwards))
    placement = looped(num_ranks, chunks)
    return Schedule(name, num_stages, num_microbatches, placement, tuple(programs))


def one_f_one_b(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Return one forward and one backward in turn (PipeDream-Flush, arXiv:2006.09503).

    Stage s of p runs p - s forwards before its first backward, and never holds the activations of
    more micro-batches than that. With several chunks it is interleaved 1F1B.
    """
    if chunks > 1:
        return interleave("1f1b~interleaved", num_ranks, num_microbatches, chunks)
    programs: list[Program] = []
    for stage in range(num_ranks):
        forwards = [Action(stage, ActionKind.F, m) for m in range(num_microbatches)]
        backwards = [Action(stage, ActionKind.B, m) for m in range(num_microbatches)]
        warmup = min(num_ranks - stage - 1, num_microbatches)
        steady = [a for pair in zip(forwards[warmup:], backwards, strict=False) for a in pair]
        cooldown = backwards[num_microbatches - warmup :]
        programs.append((*forwards[:warmup], *steady, *cooldown))
    return Schedule("1f1b", num_ranks, num_microbatches, looped(num_ranks, 1), tuple(programs))


def interleaved(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Return 1F1B over groups of p micro-batches (Megatron-LM, arXiv:2104.04473, section 2.2).

    Rank r of p runs 2 (p - r - 1) + (v - 1) p + 1 forwards before its first backward and never
    holds more, for v chunks. It is published for m a multiple of p. For another m (`~uneven`) some
    groups are larger, and the second p in the formula is the size of the first. With one chunk it
    is 1F1B.
    """
    name = "interleaved~uneven" if num_microbatches % num_ranks else "interleaved"
    name = "interleaved~1f1b" if chunks == 1 else name
    return interleave(name, num_ranks, num_microbatches, chunks)


def zb_h1(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Return 1F1B with W deferred by s micro-batches on stage s (section 2.3.1 of Zero Bubble).

    Every rank holds p micro-batches at its peak, like 1F1B's first rank. With several chunks it is
    interleaved zero bubble.
    """
    name = "zb-h1" if chunks == 1 else "zb-h1~interleaved"
    return interleave(name, num_ranks, num_microbatches, chunks, split=True)


def zb_h2(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Return ZB-H1 with twice the warm-up and W deferred twice as far (section 2.3.2).

    No rank waits once it runs. Ranks end as late as they started, so a single step gains nothing
    over ZB-H1, but the next step can start before the last rank ends. Every rank holds 2 p - 1
    micro-batches at its peak. It is published for m >= 2 p - 1; with fewer (`~short`) ranks wait.
    With several chunks it is interleaved zero bubble.
    """
    p = num_ranks
    if chunks > 1:
        return interleave("zb-h2~interleaved", p, num_microbatches, chunks, split=True)
    name = "zb-h2" if num_microbatches >= 2 * p - 1 else "zb-h2~short"
    work = TaskGraph(looped(p, 1), num_microbatches)
    order = warmup_steady(work, [2 * (p - s) - 1 for s in range(p)], [2 * s for s in range(p)])
    return work.schedule(name, merge_backward(work, order))


def interleaved_zb(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Return interleaved 1F1B with W deferred by r backwards on rank r, as in ZB-H1.

    A rank holds (v + 1) p - 1 micro-batches of a stage at its peak, like the first rank of
    interleaved 1F1B. For an m that is not a multiple of p (`~uneven`) see `interleaved`. With one
    chunk it is ZB-H1.
    """
    name = "interleaved-zb~uneven" if num_microbatches % num_ranks else "interleaved-zb"
    name = "interleaved-zb~zb-h1" if chunks == 1 else name
    return interleave(name, num_ranks, num_microbatches, chunks, split=True)


def interleave(
    name: str, num_ranks: int, num_microbatches: int, chunks: int, *, split: bool = False
) -> Schedule:
    """Return interleaved 1F1B, or 1F1B for one chunk, under any name.

    split: split backwards, and run a W on rank r r backwards later than its I (zero bubble).
    """
    p, work = num_ranks, TaskGraph(looped(num_ranks, chunks), num_microbatches)
    # Groups of p micro-batches, or more if m is not a multiple of p: in a smaller group a rank
    # would wait for its first micro-batch to come round.
    groups = even_sizes(num_microbatches, max(1, num_microbatches // p))
    # First the first group passes all chunks but the last. Then a micro-batch travels to the last
    # rank and back, in which time this rank runs two forwards for each rank behind it.
    first = (chunks - 1) * groups[0] + 1
    ahead = [p - r if chunks == 1 else 2 * (p - r - 1) + first for r in range(p)]
    if not split:
        return work.schedule(name, warmup_steady(work, ahead, groups=groups))
    order = warmup_steady(work, ahead, range(p), groups)
    return work.schedule(name, merge_backward(work, order))


def warmup_steady(
    work: TaskGraph,
    ahead: Sequence[int],
    late: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
) -> Order:
    """Return an order that alternates forwards and backwards after a warm-up, on the looped
    placement.

    ahead: for each rank the number of forwards before its first backward.
    late: for each rank the number of backwards by which a W comes after its I; None: no split.
    groups: numbers of micro-batches that a stage runs in a row; None: all.
    """
    groups = groups or [work.num_microbatches]
    order: Order = []
    for rank, stages in enumerate(work.stages):
        forwards = _in_groups(work, FORWARD, stages, groups)
        first_half = BACKWARD if late is None else INPUT
        backwards = _in_groups(work, first_half, stages[::-1], groups)
        weights = [] if late is None else _in_groups(work, WEIGHT, stages[::-1], groups)
        behind = 0 if late is None else late[rank]
        program = forwards[: ahead[rank]]
        for i, backward in enumerate(backwards):
            program.append(backward)
            if i >= behind:
                program += weights[i - behind : i - behind + 1]
            program += forwards[ahead[rank] + i : ahead[rank] + i + 1]
        order.append(program + weights[max(len(backwards) - behind, 0) :])
    return order


def _in_groups(work: TaskGraph, kind: int, stages: list[int], groups: Sequence[int]) -> list[int]:
    """Return the numbers of one kind, group by group, each through all stages."""
    numbers: list[int] = []
    first = 0
    for group in groups:
        for stage in stages:
            start = work.number(kind, stage, first)
            numbers += range(start, start + group)
        first += group
    return numbers


def zigzag(num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of each stage: down, up, down and so on."""
    down = tuple(range(num_ranks))
    return tuple(r for chunk in range(chunks) for r in (down[::-1] if chunk % 2 else down))


def zb_v(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Return ZB-V (Pipeline Parallelism with Controllable Memory, arXiv:2405.15362, section 3).

    A rank holds 2 p micro-batches of a stage at its peak, the memory of 1F1B's first rank with
    stages twice as large. It is published for two chunks and m >= 2 p. With fewer micro-batches
    (`~short`) or more chunks (`~zigzag`) it is list-scheduled within the same memory. With one
    chunk it is ZB-H1.
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
    """Return DualPipeV: DeepSeek's DualPipe (arXiv:2412.19437, section 3.2.1) cut in half.

    It follows github.com/deepseek-ai/DualPipe, without running a forward and a backward at once. A
    rank holds 2 p + 1 micro-batches of a stage at its peak. It is published for two chunks and
    m >= 2 p; see `zb_v` for other numbers.
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
        # half of the last backwards are split, and their Ws fill the gaps until the end
        half, odd = divmod(rank + 1, 2)
        program.run("iWIW", half)
        program.run("iWI", odd)
        program.run("iI", half)
        program.run("WI", behind)
        order.append(program.with_all_weights())
    return work.schedule(name, merge_backward(work, order))


def _in_the_gaps(work: TaskGraph, capacity: int) -> Order:
    """Return the shortest of a few list-scheduled orders in which no rank exceeds `capacity`."""
    best: Order = []
    for priority in (deepest_first(work.num_stages), backward_first(work.num_stages)):
        order = list_order(work, Rules.unlimited(work, priority, (capacity,) * work.num_ranks))
        if not best or work.makespan(order) < work.makespan(best):
            best = order
        if work.makespan(best) <= work.lowest_makespan() + work.tiny:
            break
    return merge_backward(work, best)


def _degraded(name: str, work: TaskGraph, chunks: int) -> str:
    """Return the name, with a suffix if the published schedule does not cover these numbers."""
    if chunks > 2:
        return f"{name}~zigzag"
    return f"{name}~short" if work.num_microbatches < 2 * work.num_ranks else name


class _ProgramBuilder:
    """A builder of a rank's program from letters, each the next micro-batch of its kind.

    F and I are for the rank's first stage, f and i for its second. W is the oldest one deferred on
    either. A letter without micro-batches left is skipped.
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
        """Append the computations of `letters`, `times` times."""
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
        """Return the program, with the remaining Ws at its end."""
        return [*self._numbers, *self._weights]
