"""The named schedules: each generator gives a compute order, which `build` makes ready to run.

A generator decides only which rank computes what in which order, for any number of ranks,
micro-batches and chunks; the passes add messages. For numbers that the published schedule does not
cover, the order is the nearest legal one, and its name says so after a `~`, as in
`interleaved~uneven`.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

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
"""A function (ranks, micro-batches, chunks), each 1 or more, -> a Schedule of computations only."""

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
"""Schedules that have two stages a rank by default."""

MAX_CELLS = (1 << 15, 1 << 12)
"""Most micro-batches times stages of a schedule built by name, and by a search (`auto`); larger
ones would take minutes."""

_OTHER_NAMES = {
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "interleaved-zb",
    "zbvzerobubble": "zb-v",
}


def canonical(name: str) -> str:
    """Return the name in GENERATORS for any spelling, including torch's names.

    Case, `-` and `_` do not count.

    Raises:
        ScheduleError: no schedule has this name.
    """
    plain = re.sub(r"[-_ ]", "", name.lower()).removeprefix("schedule")
    spellings = {ours.replace("-", ""): ours for ours in GENERATORS} | _OTHER_NAMES
    if plain not in spellings:
        raise ScheduleError(f"no schedule {name!r}; use one of {', '.join(GENERATORS)}")
    return spellings[plain]


def num_chunks(name: str, chunks: int | None = None) -> int:
    """Return the stages on each rank: `chunks`, or the default of the schedule of this name."""
    return chunks or (2 if name in TWO_CHUNKS else 1)


def build(name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None) -> Schedule:
    """Return the named schedule with its messages, fused and checked, ready to run or draw.

    chunks: stages a rank; None: the schedule's default, 1 or 2.

    Raises:
        ScheduleError: no generator has that name, or a count is below 1.
    """
    return lower(computations(name, num_ranks, num_microbatches, chunks))


def computations(
    name: str, num_ranks: int, num_microbatches: int, chunks: int | None = None
) -> Schedule:
    """Return the same without messages, which predictions need not; raise as `build`."""
    ours = canonical(name)
    chunks = num_chunks(ours) if chunks is None else chunks
    if min(num_ranks, num_microbatches, chunks) < 1:
        raise ScheduleError(
            f"{ours}: {num_ranks} ranks, {num_microbatches} microbatches, {chunks} chunks; "
            f"use 1 or more of each"
        )
    return _computations(ours, num_ranks, num_microbatches, chunks)


@lru_cache(maxsize=16)
def _computations(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Make each schedule once for all plans of a search."""
    return GENERATORS[name](num_ranks, num_microbatches, chunks)


def evaluation(schedule: Schedule, num_microbatches: int) -> Schedule:
    """Return a schedule of forwards only on the placement of `schedule`, as eval_step runs it."""
    if num_microbatches < 1:
        raise ScheduleError(f"{num_microbatches} microbatches to evaluate; use 1 or more")
    work = TaskGraph(schedule.placement, num_microbatches)
    rules = replace(Rules.unlimited(work, deepest_first(work.num_stages)), backward=False)
    return lower(work.schedule("forward", list_order(work, rules)))
