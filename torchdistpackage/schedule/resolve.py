"""Resolution of a user's schedule: a name, a value, or a table in a file; and reading such tables.

Tables use the CSV format of torch.distributed.pipelining: a line is a pipe rank, a cell an action
(`2F0`), and an empty cell nothing. Only the computations of a file are used. Its messages suit the
program that wrote it, so they are placed again here.
"""

import csv
import io
import re
from itertools import chain, islice
from numbers import Integral
from pathlib import Path
from typing import cast

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Action, ActionKind, Schedule, flatten, parse_action
from torchdistpackage.schedule.autoschedule import synthesize
from torchdistpackage.schedule.costs import MAX_BYTES as MAX_BYTES
from torchdistpackage.schedule.costs import StageCosts, read_costs, read_text
from torchdistpackage.schedule.generators import GENERATORS, build, canonical
from torchdistpackage.schedule.passes import add_messages, check, check_computations, lower

_Cell = tuple[Action, int, int]
"""A computation, its line, and the number of its cell in that line."""

_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
# Actions that torch lists and this package does not need: hooks gather, free and reduce sharded
# parameters, and a send keeps its tensor until it is done. torch 2.15 adds waits for sends.
_PASSED_OVER = re.compile(r"\d+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|WAIT_SEND_[FB])\d*")


def to_csv(schedule: Schedule, *, messages: bool = False, waits: bool = False) -> str:
    """Return the schedule as CSV text that torch's `_load_csv` reads, one line a pipe rank.

    messages: list messages too (torch's format "compute_comms"), one by one, in an order without
        deadlock. Otherwise list only computations ("compute_only"), and torch adds its messages.
    waits: end a line with the waits for its sends, which torch requires from 2.15 on.
    """
    if messages:
        schedule = add_messages(schedule)
    lines: list[str] = []
    for program in schedule.programs:
        actions = [a for a in flatten(program) if messages or not a.kind.is_message]
        cells = list(map(str, actions))
        if waits:
            sends = [a for a in actions if a.kind in (ActionKind.SEND_F, ActionKind.SEND_B)]
            cells += [f"{a.stage}WAIT_{a.kind}{a.microbatch}" for a in sends]
        lines.append(",".join(cells) + "\n")
    return "".join(lines)


def csv_text(path: Path) -> str:
    """Return the text of a CSV file of at most MAX_BYTES; raise ScheduleError if it cannot be
    read.
    """
    return read_text(path, "CSV file of text")


def from_csv(text: str, name: str = "custom") -> Schedule:
    """Parse the text of `to_csv` or of torch's `_dump_csv`; add messages, fuse and check them.

    The line of a stage's actions is its pipe rank. The highest numbers give the numbers of stages
    and micro-batches. An overlapped pair counts as its two actions, one after the other.

    Raises:
        ScheduleError: a cell is invalid (the message names line and cell), a stage is on two lines,
            or the schedule is incomplete or out of order.
    """
    try:
        lines = list(csv.reader(io.StringIO(text.strip())))
    except csv.Error as error:  # for example an open quote, or a lone carriage return
        raise ScheduleError(f"{name}: not CSV: {error}; write actions between commas") from error
    rows = [_row(line, texts) for line, texts in enumerate(lines, 1)]
    if not rows:
        raise ScheduleError(f"{name} is empty; write a line with the actions of each pipe rank")
    cells = list(chain.from_iterable(rows))
    line_of: dict[int, int] = {}
    for action, line, _ in cells:
        if (home := line_of.setdefault(action.stage, line)) != line:
            raise ScheduleError(
                f"line {line}: {action} belongs to stage {action.stage}, which line {home} runs; "
                "keep a stage on one line"
            )
    num_stages = max(line_of) + 1
    missing = list(islice((s for s in range(num_stages) if s not in line_of), 3))
    if missing:
        raise ScheduleError(
            f"{name}: the highest stage is {num_stages - 1} but no line runs stage "
            f"{', '.join(map(str, missing))}; number the stages from 0 without holes"
        )
    placement = tuple(line_of[stage] - 1 for stage in range(num_stages))
    programs = tuple(tuple(action for action, *_ in row) for row in rows)
    schedule = Schedule(name, num_stages, _num_microbatches(cells), placement, programs)
    check_computations(schedule)
    return lower(schedule)


def _num_microbatches(cells: list[_Cell]) -> int:
    """Return the number of micro-batches; raise if the highest number has too few forwards.

    The check finds a mistyped number.
    """
    highest, line, number = max(cells, key=lambda cell: cell[0].microbatch)
    count = 1 + highest.microbatch
    forwards = sum(a.kind is ActionKind.F and a.stage == highest.stage for a, _, _ in cells)
    if count > forwards:
        raise ScheduleError(
            f"line {line}, cell {number}: {highest} has microbatch {highest.microbatch}, but "
            f"stage {highest.stage} has {forwards} forwards; number the microbatches from 0 "
            "without gaps"
        )
    return count


def _row(line: int, texts: list[str]) -> list[_Cell]:
    """Return the computations of one line with their line and cell numbers."""
    cells = [
        (action, line, number)
        for number, text in enumerate(texts, 1)
        for action in _actions(line, number, text.strip())
    ]
    if not cells:
        raise ScheduleError(f"line {line} has no action; write those of one pipe rank")
    return cells


def _actions(line: int, number: int, text: str) -> list[Action]:
    """Return the computations in one cell: one, or two of an overlapped pair."""
    overlap = _OVERLAP.fullmatch(text)
    parts = [part.strip() for part in overlap[1].split(";")] if overlap else [text]
    try:
        actions = [parse_action(p) for p in parts if p and not _PASSED_OVER.fullmatch(p)]
    except ScheduleError as error:
        raise ScheduleError(f"line {line}, cell {number}: {error}") from error
    return [action for action in actions if not action.kind.is_message]


Order = Schedule | str | Path
"""A schedule; a name; `auto`; a CSV file, or its text."""
CostsOrder = StageCosts | str | Path
"""Costs of each stage, or the file that holds them."""


def resolve_schedule(
    order: Order,
    num_ranks: int,
    num_microbatches: int | None,
    chunks: int | None = None,
    costs: CostsOrder | None = None,
) -> Schedule:
    """Return the schedule that `order` stands for, on `num_ranks` pipe ranks, with messages,
    checked.

    num_microbatches, chunks: not needed for a schedule or a table, which contain them.
    costs: costs of each stage, for `auto`, which searches the fastest order with stage s on rank
        s % p.

    Raises:
        ScheduleError: the name is unknown, the order cannot run or has other numbers, or an
            argument has the wrong type.
    """
    _check_values(order, num_microbatches, chunks, costs)
    if isinstance(order, str) and order.lower().endswith(".csv"):
        order = Path(order)
    if isinstance(order, Path):
        order = from_csv(csv_text(order))
    elif isinstance(order, str) and ("," in order or "\n" in order):
        order = from_csv(order)
    if isinstance(order, Schedule):
        return _fitting(order, num_ranks, num_microbatches, chunks)
    if num_microbatches is None:
        raise ScheduleError(f"schedule {order!r} needs num_microbatches; give 1 or more")
    if order.lower() != "auto":
        try:
            order = canonical(order)
        except ScheduleError as error:
            raise ScheduleError(f"{error}, auto, or a file FILE.csv") from error
        return build(order, num_ranks, num_microbatches, chunks)
    if costs is None:
        raise ScheduleError("schedule 'auto' needs costs of each stage; give costs=")
    chunks = chunks or 1
    if not isinstance(costs, StageCosts):
        costs = read_costs(costs).of(num_ranks * chunks)
    # the stages exist already, so the search must not choose their ranks
    placement = tuple(stage % num_ranks for stage in range(num_ranks * chunks))
    return synthesize(num_ranks, num_microbatches, costs, chunks=chunks, placement=placement)


def has_backward(schedule: Schedule) -> Schedule:
    """Return `schedule`; raise ScheduleError if it has no backwards."""
    if not schedule.has_backward:
        raise ScheduleError(
            f"schedule {schedule.name} has no backwards, so a step would train nothing; use one "
            f"that has ({', '.join(name for name in GENERATORS if name != 'forward')}), or "
            f"evaluate: eval_step, predict, forward_only=True"
        )
    return schedule


def _check_values(order: object, num_microbatches: object, chunks: object, costs: object) -> None:
    """Raise ScheduleError if a user's argument has the wrong type."""
    if not isinstance(order, Schedule | str | Path):
        raise ScheduleError(
            f"schedule is {order!r}; give a name, auto, a Schedule, or a CSV file or its text"
        )
    for name, value in (("num_microbatches", num_microbatches), ("chunks", chunks)):
        if value is not None and not (isinstance(value, Integral) and cast(int, value) >= 1):
            raise ScheduleError(f"{name} is {value!r}; give a whole number of 1 or more")
    if costs is not None and not isinstance(costs, StageCosts | str | Path):
        raise ScheduleError(f"costs are {costs!r}; give StageCosts, or the file that holds them")


def _fitting(
    schedule: Schedule, num_ranks: int, num_microbatches: int | None, chunks: int | None
) -> Schedule:
    """Return a schedule with messages; raise ScheduleError if it has other numbers than asked."""
    comparisons = (
        ("pipe ranks", num_ranks, len(schedule.programs)),
        ("microbatches", num_microbatches, schedule.num_microbatches),
        ("stages", chunks and chunks * num_ranks, schedule.num_stages),
    )
    for quantity, expected, actual in comparisons:
        if expected is not None and expected != actual:
            raise ScheduleError(
                f"schedule {schedule.name} has {actual} {quantity}, but {expected} are needed; "
                "give a schedule that fits"
            )
    if not any(a.kind.is_message for program in schedule.programs for a in flatten(program)):
        return lower(schedule)
    check(schedule)
    return schedule
