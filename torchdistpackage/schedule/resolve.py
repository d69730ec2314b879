"""The schedule that a user means: by name, as a value, or as a table in a file."""

from numbers import Integral
from pathlib import Path
from typing import cast

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Schedule, flatten
from torchdistpackage.schedule.autoschedule import synthesize
from torchdistpackage.schedule.check import check
from torchdistpackage.schedule.costs import StageCosts, read_costs
from torchdistpackage.schedule.csv import csv_text, from_csv
from torchdistpackage.schedule.generators import GENERATORS, build, canonical
from torchdistpackage.schedule.passes import lower

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
    """`order` for so many pipe ranks, with its messages, checked.

    num_microbatches, chunks: not needed for a schedule or a table, which say them. costs: of each
        stage, for `auto`, which looks for the fastest order with stage s on rank s % p.

    Raises:
        ScheduleError: no such name, the order cannot run, it is of other numbers, or a value
            is none of these.
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
    # the stages are built already, so their places are not to be chosen
    placement = tuple(stage % num_ranks for stage in range(num_ranks * chunks))
    return synthesize(num_ranks, num_microbatches, costs, chunks=chunks, placement=placement)


def has_backward(schedule: Schedule) -> Schedule:
    """`schedule`, which trains. Raises ScheduleError: it has no backwards."""
    if not schedule.has_backward:
        raise ScheduleError(
            f"schedule {schedule.name} has no backwards, so a step would train nothing; use one "
            f"that has ({', '.join(name for name in GENERATORS if name != 'forward')}), or "
            f"evaluate: eval_step, predict, forward_only=True"
        )
    return schedule


def _check_values(order: object, num_microbatches: object, chunks: object, costs: object) -> None:
    """Types of values that come from a user."""
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
    given: Schedule, num_ranks: int, num_microbatches: int | None, chunks: int | None
) -> Schedule:
    """`given` with messages, if it is of these numbers."""
    asked = (
        ("pipe ranks", num_ranks, len(given.programs)),
        ("microbatches", num_microbatches, given.num_microbatches),
        ("stages", chunks and chunks * num_ranks, given.num_stages),
    )
    for what, wanted, has in asked:
        if wanted is not None and wanted != has:
            raise ScheduleError(
                f"schedule {given.name} is of {has} {what}, asked are {wanted}; give one that fits"
            )
    if not any(a.kind.is_message for program in given.programs for a in flatten(program)):
        return lower(given)
    check(given)
    return given
