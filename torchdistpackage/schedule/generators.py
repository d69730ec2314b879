"""The schedules by name: each a compute order, made ready to run by `build`.

A generator says only which rank computes what in which order, for any number of ranks, microbatches
and chunks; messages are added by the passes. Where the published schedule does not reach, the
order is the nearest legal one, and its name says so after a `~`, such as `interleaved~uneven`.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Schedule
from torchdistpackage.schedule.engine import TaskGraph
from torchdistpackage.schedule.list_scheduling import Rules, deepest_first, list_order
from torchdistpackage.schedule.orders import (
    dualpipe_v,
    forward_only,
    gpipe,
    interleaved,
    interleaved_zb,
    looped_bfs,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from torchdistpackage.schedule.passes import lower

Generator = Callable[[int, int, int], Schedule]
"""(ranks, microbatches, chunks), each 1 or more, to a Schedule of computations only."""

GENERATORS: dict[str, Generator] = {
    "forward": forward_only,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "interleaved-zb": interleaved_zb,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
}

TWO_CHUNKS = frozenset({"interleaved", "looped-bfs", "interleaved-zb", "zb-v", "dualpipe-v"})
"""Schedules that have two stages a rank unless they are asked for another number."""

MAX_CELLS = (1 << 15, 1 << 12)
"""Microbatches times stages of a schedule that is made, by name or by a search (`auto`): larger
ones take minutes."""

_OTHER_NAMES = {
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "interleaved-zb",
    "zbvzerobubble": "zb-v",
}


def canonical(name: str) -> str:
    """The name in GENERATORS of any spelling, torch's names too; raises ScheduleError for no name.

    Case, `-` and `_` do not count.
    """
    plain = re.sub(r"[-_ ]", "", name.lower()).removeprefix("schedule")
    spellings = {ours.replace("-", ""): ours for ours in GENERATORS} | _OTHER_NAMES
    if plain not in spellings:
        raise ScheduleError(f"no schedule {name!r}; the names are {', '.join(GENERATORS)}")
    return spellings[plain]


def num_chunks(name: str, chunks: int | None = None) -> int:
    """Stages on each rank: `chunks`, or as many as the schedule of this name in GENERATORS has."""
    return chunks or (2 if name in TWO_CHUNKS else 1)


def build(name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None) -> Schedule:
    """The named schedule with its messages, fused and checked: ready to run or draw.

    chunks: stages a rank; None means the schedule's own number, 1 or 2.

    Raises:
        ScheduleError: no generator by that name, or a count below 1.
    """
    ours = canonical(name)
    chunks = num_chunks(ours) if chunks is None else chunks
    if min(num_ranks, num_microbatches, chunks) < 1:
        raise ScheduleError(
            f"{ours}: {num_ranks} ranks, {num_microbatches} microbatches, {chunks} chunks; "
            f"use 1 or more of each"
        )
    return lower(GENERATORS[ours](num_ranks, num_microbatches, chunks))


def evaluation(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Forwards alone on the placement of `schedule`, with messages: what eval_step runs."""
    if num_microbatches < 1:
        raise ScheduleError(f"{num_microbatches} microbatches to evaluate; use 1 or more")
    work = TaskGraph(schedule.placement, num_microbatches)
    rules = replace(Rules.unlimited(work, deepest_first(work.num_stages)), backward=False)
    return lower(work.schedule("forward", list_order(work, rules)))
