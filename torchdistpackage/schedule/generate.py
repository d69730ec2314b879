"""Compute orders of the pipeline schedules with one stage a rank: forward, gpipe, 1f1b.

A generator says only who computes what in which order; messages are added by the passes,
and `build` is the way from a name to a schedule that has passed the checks.
"""

from collections.abc import Callable

from torchdistpackage.errors import ScheduleError
from torchdistpackage.schedule.actions import Action, Kind, Program, Schedule
from torchdistpackage.schedule.check import check
from torchdistpackage.schedule.passes import add_messages, fuse_messages

Generator = Callable[[int, int], tuple[Program, ...]]


def forward_only(num_stages: int, num_microbatches: int) -> tuple[Program, ...]:
    """Every stage runs its forwards in order: evaluation and generation."""
    return tuple(_run(stage, Kind.F, num_microbatches) for stage in range(num_stages))


def gpipe(num_stages: int, num_microbatches: int) -> tuple[Program, ...]:
    """All forwards, then all backwards (GPipe, arXiv:1811.06965)."""
    return tuple(
        (*_run(stage, Kind.F, num_microbatches), *_run(stage, Kind.B, num_microbatches))
        for stage in range(num_stages)
    )


def one_f_one_b(num_stages: int, num_microbatches: int) -> tuple[Program, ...]:
    """One forward, one backward in turn (PipeDream-Flush, arXiv:2006.09503).

    Stage s of p first runs p - s - 1 forwards, so it never holds the activations of more
    than p - s microbatches.
    """
    programs: list[Program] = []
    for stage in range(num_stages):
        warmup = min(num_stages - stage - 1, num_microbatches)
        fwd = _run(stage, Kind.F, num_microbatches)
        bwd = _run(stage, Kind.B, num_microbatches)
        steady = [a for pair in zip(fwd[warmup:], bwd, strict=False) for a in pair]
        programs.append((*fwd[:warmup], *steady, *bwd[num_microbatches - warmup :]))
    return tuple(programs)


GENERATORS: dict[str, Generator] = {
    "forward": forward_only,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}


def build(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """The named schedule with its messages, fused and checked: ready to run or draw.

    Raises:
        ScheduleError: no generator by that name, or a count below 1.
    """
    if name not in GENERATORS:
        raise ScheduleError(f"no schedule {name!r}; the names are {', '.join(GENERATORS)}")
    if num_stages < 1 or num_microbatches < 1:
        raise ScheduleError(
            f"{name}: {num_stages} stages, {num_microbatches} microbatches; use 1 or more of each"
        )
    compute = Schedule(
        name,
        num_stages,
        num_microbatches,
        tuple(range(num_stages)),
        GENERATORS[name](num_stages, num_microbatches),
    )
    schedule = fuse_messages(add_messages(compute))
    check(schedule)
    return schedule


def _run(stage: int, kind: Kind, num_microbatches: int) -> tuple[Action, ...]:
    return tuple(Action(stage, kind, m) for m in range(num_microbatches))
