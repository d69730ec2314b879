"""The ranks and groups that a `tdp comm` command is about, and a function on them.

All that is wrong with the arguments is reported at once, and before a process is started.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from torchdistpackage.cli._common import PROCS
from torchdistpackage.config.errors import ConfigErrors, Problem, nearest
from torchdistpackage.config.load import load
from torchdistpackage.environment.rendezvous import Rendezvous, detect
from torchdistpackage.errors import CommError, RankError, TopologyError
from torchdistpackage.harness.comm_test_report import CommTestError
from torchdistpackage.harness.pool import num_ranks, run_on_topology
from torchdistpackage.plan.run_plan import local_procs, make_plan
from torchdistpackage.topology.mesh import DEFAULT_ORDER, topology

_LINE = "command line"
_IN_FILE = " or remove procs from the file"
"""Advice that does not fit ranks asked for by --procs."""

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] section.key=value",
        help="YAML file of a run, and values that override it.",
    ),
]
Axes = Annotated[
    str | None,
    typer.Option(metavar="AXIS=N,...", help="Mesh axes, outermost first, such as data=2,pipe=2."),
]
Procs = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Number of local processes; a launcher sets its own."),
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

    def wrong(why: str) -> None:
        problems.append(Problem(_LINE, None, "", why))

    here, found = detect(os.environ), None
    if words and axes is not None:
        wrong(f"both CONFIG ({words[0]}) and --axes ({axes}) say which groups there are; give one")
    sizes = _parsed(axes, problems) if axes is not None else (("data", None),)
    if not words and axes is None and procs is None and here.source == "alone":
        wrong("nothing says how many ranks there are; give CONFIG, --axes or --procs")
    try:
        if words:
            found = _of_run(words, procs, here)
        elif not problems:
            number = num_ranks(sizes, procs, here)
            found = CommTarget(topology(sizes, number).dense.axes, number)
    except ConfigErrors as error:
        problems.extend(error.problems)
    except TopologyError as error:
        wrong(str(error))
    if problems or found is None:
        raise ConfigErrors("tdp comm", problems)
    return found


def run_ranks(
    fn: str, args: Sequence[object], target: CommTarget, *, init_timeout_s: float
) -> list[Any] | None:
    """What `fn(*args)` returns on the ranks of `target`, as `run_on_topology` has it.

    A CommError is reported once for all ranks and without a traceback.

    init_timeout_s: for the ranks to meet, where the target does not say.

    Raises:
        CommError: what the ranks found.
        LaunchError, RankError: a rank did not come, or ended without a text.
    """
    with TemporaryDirectory() as folder:
        note = Path(folder) / "error"
        try:
            return run_on_topology(
                fn,
                args,
                axes=target.axes,
                procs=target.num_ranks,
                expert=target.expert,
                init_timeout_s=target.init_timeout_s or init_timeout_s,
                note=str(note),
            )
        except CommTestError as error:
            # this process is one of the ranks, all of which have the same text
            if error.speaker in (None, detect(os.environ).rank):
                raise
            raise typer.Exit(1) from error
        except RankError as error:
            if not note.exists():
                raise
            how = str(error).partition("\n")[0]
            more = "" if "Error" in how else f"\n{how}"  # a stop or a kill only the parent knows
            raise CommError(note.read_text(encoding="utf-8") + more) from None


def _of_run(words: Sequence[str], procs: int | None, here: Rendezvous) -> CommTarget:
    """CONFIG and changes; what is wrong with --procs is reported as the option, not as the key."""
    given = f"{PROCS}={procs}"
    launched = None if here.source == "alone" else num_ranks((), procs, here)
    try:
        run = load(words[0], [*words[1:], *([] if procs is None else [given])], launched)
        plan = make_plan(run, launched or local_procs(run), words[0])
    except ConfigErrors as error:
        problems = [
            replace(
                problem,
                file=problem.file.replace(given, f"--procs {procs}"),
                path="" if problem.path == PROCS and procs is not None else problem.path,
                text=problem.text if procs is None else _as_option(problem.text),
            )
            for problem in error.problems
        ]
        raise ConfigErrors("tdp comm", problems) from error
    return CommTarget(
        plan.topology.dense.axes,
        plan.world_size,
        plan.config.parallel.expert,
        plan.config.launch.init_timeout_s,
    )


def _as_option(text: str) -> str:
    """Return the text of a problem with the key, as one with --procs."""
    return text.replace(f"{PROCS} is", "--procs is").replace(_IN_FILE, "")


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
