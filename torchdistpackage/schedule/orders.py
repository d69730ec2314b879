"""Orders of the schedules by name, on two placements of stages.

On the looped placement are GPipe, 1F1B, their forms with chunks, and with split backwards. Where
backwards are split (Zero Bubble Pipeline Parallelism, arXiv:2401.10241), the gradient of a stage's
input goes on at once, that of its weights (W) waits for a time in which the rank would be idle.
With F = I = W = 1 and free messages all that remains is that rank r starts r forwards late.

On the zigzag placement are ZB-V and DualPipeV, two stages a rank, first and last together: down the
ranks, then up again. The loss is on rank 0, so its backwards begin as soon as the first microbatch
is back, and all ranks hold alike.

A generator takes any number of ranks, microbatches and chunks (stages a rank). Where one has the
order of another for that number of chunks, the name says so after a `~`.
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
    """The rank of each stage: round and round, so a microbatch passes each rank `chunks` times."""
    return tuple(range(num_ranks)) * chunks


def gpipe(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """All forwards, then all backwards (GPipe, arXiv:1811.06965).

    Every stage holds all microbatches at its peak.
    """
    name = "gpipe" if chunks == 1 else "gpipe~looped"
    return _breadth_first(name, num_ranks, num_microbatches, chunks)


def looped_bfs(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Breadth-first pipeline parallelism (arXiv:2211.05953): GPipe with several chunks.

    A stage runs all that it has in a row, and holds all microbatches at its peak.
    """
    name = "looped-bfs" if chunks > 1 else "looped-bfs~gpipe"
    return _breadth_first(name, num_ranks, num_microbatches, chunks)


def forward_only(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Every stage runs its forwards in order: evaluation and generation."""
    return _breadth_first("forward", num_ranks, num_microbatches, chunks, backward=False)


def _breadth_first(
    name: str, num_ranks: int, num_microbatches: int, chunks: int, *, backward: bool = True
) -> Schedule:
    """Stage by stage all forwards, then, from the last stage, all backwards."""
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
    """One forward, one backward in turn (PipeDream-Flush, arXiv:2006.09503).

    Stage s of p runs p - s forwards before its first backward and never holds the activations
    of more microbatches than that. Several chunks are interleaved 1F1B.
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
    """1F1B over groups of p microbatches (Megatron-LM, arXiv:2104.04473, section 2.2).

    Rank r of p runs 2 (p - r - 1) + (v - 1) p + 1 forwards before its first backward and never
    holds more. Published for m a multiple of p; for another m (`~uneven`) some groups are larger,
    and the second p in the formula is the size of the first. One chunk is 1F1B.
    """
    name = "interleaved~uneven" if num_microbatches % num_ranks else "interleaved"
    name = "interleaved~1f1b" if chunks == 1 else name
    return interleave(name, num_ranks, num_microbatches, chunks)


def zb_h1(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """1F1B with W put off: s microbatches on stage s (section 2.3.1 of Zero Bubble).

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
    name = "interleaved-zb~uneven" if num_microbatches % num_ranks else "interleaved-zb"
    name = "interleaved-zb~zb-h1" if chunks == 1 else name
    return interleave(name, num_ranks, num_microbatches, chunks, split=True)


def interleave(
    name: str, num_ranks: int, num_microbatches: int, chunks: int, *, split: bool = False
) -> Schedule:
    """Interleaved 1F1B, or 1F1B for one chunk, under any name.

    split: backwards are, and on rank r a W comes r backwards later than its I: zero bubble.
    """
    p, work = num_ranks, TaskGraph(looped(num_ranks, chunks), num_microbatches)
    # Of p microbatches, or more where m is no multiple of p: with less than p a rank would wait
    # for the first of a group to come round.
    groups = even_sizes(num_microbatches, max(1, num_microbatches // p))
    # The first group goes through all chunks but the last. Then, until a forward that leaves here
    # is back as a gradient, a rank runs two for each rank behind it: that forward and one more.
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
    """The order in turns on the looped placement.

    ahead: for each rank the forwards before its first backward. late: for each rank how many
    backwards later than its I a W comes; None leaves backwards unsplit. groups: how many
    microbatches a stage runs in a row; None means all.
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
    numbers: list[int] = []
    first = 0
    for group in groups:
        for stage in stages:
            start = work.number(kind, stage, first)
            numbers += range(start, start + group)
        first += group
    return numbers


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
