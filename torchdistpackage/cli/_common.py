"""Arguments that commands share; the ranks and groups that a `tdp comm` command is about.

One rule: all that is wrong is said at once, and before a process is started.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from torchdistpackage.config.errors import ConfigErrors, Problem, nearest
from torchdistpackage.config.load import load
from torchdistpackage.errors import TopologyError
from torchdistpackage.harness.run_on_topology import num_ranks
from torchdistpackage.launch.rendezvous import detect
from torchdistpackage.topology.views import DEFAULT_ORDER, topology
from torchdistpackage.train.plan import local_procs, make_plan

PROCS = "launch.local.procs"
"""The key that a number of ranks on the command line stands for."""

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="section.key=value", help="Values that win over the file."),
]

_LINE = "command line"

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] section.key=value", help="YAML file of a run, and changes to it."
    ),
]
Axes = Annotated[
    str | None,
    typer.Option(metavar="AXIS=N,...", help="Groups, outermost first, e.g. data=2,pipe=2."),
]
Procs = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Processes to start; a launcher knows its own number."),
]


@dataclass(frozen=True, slots=True)
class CommTarget:
    """Groups along `axes` (outermost first) over `num_ranks` ranks; for `run_on_topology`.

    init_timeout_s: what CONFIG says; None: there is none.
    """

    axes: tuple[tuple[str, int | None], ...]
    num_ranks: int
    expert: int = 1
    init_timeout_s: float | None = None


def parse_target(words: Sequence[str], axes: str | None, procs: int | None) -> CommTarget:
    """What the command line means here; without both CONFIG and axes, all ranks as one data axis.

    words: CONFIG, and changes to it.

    Raises:
        ConfigError: lists all that is wrong.
    """
    problems: list[Problem] = []
    if words and axes is not None:
        why = f"both CONFIG ({words[0]}) and --axes ({axes}) say which groups there are; give one"
        problems.append(Problem(_LINE, None, "", why))
    sizes = _parsed(axes, problems) if axes is not None else (("data", None),)
    if not words and axes is None and procs is None and detect(os.environ).source == "alone":
        why = "nothing says how many ranks there are; give CONFIG, --axes or --procs"
        problems.append(Problem(_LINE, None, "", why))
    if words:
        found = _of_run(words[0], words[1:], procs, problems)
    else:
        found = _by_hand(sizes, procs, problems)
    if problems or found is None:
        raise ConfigErrors("tdp comm", problems)
    return found


def _of_run(
    config: str, overrides: Sequence[str], procs: int | None, problems: list[Problem]
) -> CommTarget | None:
    here = detect(os.environ)
    changes = [*overrides, *([f"{PROCS}={procs}"] if procs is not None else [])]
    try:
        launched = None
        if here.source != "alone":
            launched = num_ranks((), procs, here)
        run = load(config, changes, launched)
        plan = make_plan(run, launched or local_procs(run), config)
    except ConfigErrors as error:
        given = f"{PROCS}={procs}"  # as what we have made of the option
        problems.extend(
            replace(
                problem,
                file=problem.file.replace(given, f"--procs {procs}"),
                path="" if problem.path == PROCS and procs is not None else problem.path,
                text=problem.text.replace(f"{given} does", "it does"),
            )
            for problem in error.problems
        )
    except TopologyError as error:
        problems.append(Problem(_LINE, None, "", str(error)))
    else:
        return CommTarget(
            plan.topology.dense.axes,
            plan.world_size,
            plan.config.parallel.expert,
            plan.config.launch.init_timeout_s,
        )
    return None


def _by_hand(
    sizes: tuple[tuple[str, int | None], ...], procs: int | None, problems: list[Problem]
) -> CommTarget | None:
    if problems:
        return None
    try:
        number = num_ranks(sizes, procs, detect(os.environ))
        tiled = topology(sizes, number)
    except TopologyError as error:
        problems.append(Problem(_LINE, None, "", str(error)))
        return None
    return CommTarget(tiled.dense.axes, number)


def _parsed(text: str, problems: list[Problem]) -> tuple[tuple[str, int | None], ...]:
    """`data=2,pipe=2` as ((data, 2), (pipe, 2)); a size may be auto."""
    sizes: list[tuple[str, int | None]] = []
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        why = ""
        if not equals:
            why = "an axis is written AXIS=N, e.g. data=2"
        elif name not in DEFAULT_ORDER:
            close = nearest(name, DEFAULT_ORDER)
            valid = f"did you mean {close}?" if close else f"valid: {', '.join(DEFAULT_ORDER)}"
            why = f"no axis {name!r}; {valid}"
        elif name in dict(sizes):
            why = f"axis {name} is given twice"
        elif size != "auto" and not (size.isascii() and size.isdigit() and int(size) > 0):
            why = f"{name} wants a whole number of ranks, 1 or more, or auto; got {size!r}"
        if why:
            problems.append(Problem(f"{_LINE}: --axes {part.strip()}", None, "", why))
        else:
            sizes.append((name, None if size == "auto" else int(size)))
    return tuple(sizes)
