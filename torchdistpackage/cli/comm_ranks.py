"""Parse the ranks and groups that a `tdp comm` command names, and run a function on them.

All that is wrong with the arguments is reported at once, before any process is started.
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
"""The part of an advice that does not apply when --procs gave the number."""

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] section.key=value",
        help="YAML file of a run whose ranks and groups to take, and values that override it.",
    ),
]
Axes = Annotated[
    str | None,
    typer.Option(
        metavar="AXIS=N,...",
        help="Axes of the mesh, outermost first, such as data=2,pipe=2; in place of CONFIG.",
    ),
]
Procs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Number of processes to start on this machine; not under a launcher.",
    ),
]


@dataclass(frozen=True, slots=True)
class CommTarget:
    """The groups along `axes` (outermost first) of `num_ranks` ranks, for `run_on_topology`.

    init_timeout_s: launch.init_timeout_s of CONFIG; None without CONFIG. share_gpus: likewise.
    """

    axes: tuple[tuple[str, int | None], ...]
    num_ranks: int
    expert: int = 1
    init_timeout_s: float | None = None
    share_gpus: bool = False


def parse_target(words: Sequence[str], axes: str | None, procs: int | None) -> CommTarget:
    """Return the ranks and groups of a command line.

    Without CONFIG and axes all ranks form one data axis.

    Args:
        words: CONFIG, and overrides of it.

    Raises:
        ConfigError: lists all that is wrong.
    """
    problems: list[Problem] = []

    def wrong(why: str) -> None:
        problems.append(Problem(_LINE, None, "", why))

    rendezvous, target = detect(os.environ), None
    if words and axes is not None:
        wrong(f"both CONFIG ({words[0]}) and --axes ({axes}) name the groups; give only one")
    sizes = _parsed(axes, problems) if axes is not None else (("data", None),)
    if not words and axes is None and procs is None and rendezvous.source == "alone":
        wrong("the number of ranks is not known; give CONFIG, --axes or --procs")
    try:
        if words:
            target = _of_run(words, procs, rendezvous)
        elif not problems:
            number = num_ranks(sizes, procs, rendezvous)
            target = CommTarget(topology(sizes, number).dense.axes, number)
    except ConfigErrors as error:
        problems.extend(error.problems)
    except TopologyError as error:
        wrong(str(error))
    if problems or target is None:
        raise ConfigErrors("tdp comm", problems)
    return target


def run_ranks(
    fn: str, args: Sequence[object], target: CommTarget, *, init_timeout_s: float
) -> list[Any] | None:
    """Run `fn(*args)` on the ranks of `target`; return its results as `run_on_topology` does.

    A CommError is reported once for all ranks and without a traceback.

    Args:
        init_timeout_s: seconds for the ranks to join, if the target has no such timeout.

    Raises:
        CommError: the ranks found a fault.
        LaunchError, RankError: a rank did not join, or ended without a report.
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
                share_gpus=target.share_gpus,
            )
        except CommTestError as error:
            # this process is one of the ranks, and all of them have the same message: one prints it
            if error.speaker in (None, detect(os.environ).rank):
                raise
            raise typer.Exit(1) from error
        except RankError as error:
            if not note.exists():
                raise
            first_line = str(error).partition("\n")[0]
            # only the parent knows that a rank was stopped or killed
            more = "" if "Error" in first_line else f"\n{first_line}"
            raise CommError(note.read_text(encoding="utf-8") + more) from None


def _of_run(words: Sequence[str], procs: int | None, rendezvous: Rendezvous) -> CommTarget:
    """Return the ranks of CONFIG with its overrides; problems name --procs instead of its key."""
    override = f"{PROCS}={procs}"
    launched = None if rendezvous.source == "alone" else num_ranks((), procs, rendezvous)
    try:
        run = load(words[0], [*words[1:], *([] if procs is None else [override])], launched)
        plan = make_plan(run, launched or local_procs(run), words[0])
    except ConfigErrors as error:
        problems = [
            replace(
                problem,
                file=problem.file.replace(override, f"--procs {procs}"),
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
        plan.config.launch.share_gpus,
    )


def _as_option(text: str) -> str:
    """Return the text of a problem about the key procs as one about the option --procs."""
    return text.replace(f"{PROCS} is", "--procs is").replace(_IN_FILE, "")


def _parsed(text: str, problems: list[Problem]) -> tuple[tuple[str, int | None], ...]:
    """Parse `data=2,pipe=2` into ((data, 2), (pipe, 2)); a size may be auto, which is None."""
    sizes: list[tuple[str, int | None]] = []
    for part in text.split(","):
        name, equals, size = (field.strip() for field in part.partition("="))
        why = ""
        if not equals:
            why = "write an axis as AXIS=N, such as data=2"
        elif name not in DEFAULT_ORDER:
            close = nearest(name, DEFAULT_ORDER)
            valid = f"did you mean {close}?" if close else f"valid: {', '.join(DEFAULT_ORDER)}"
            why = f"there is no axis {name!r}; {valid}"
        elif name in dict(sizes):
            why = f"axis {name} is given twice; give it once"
        elif size != "auto" and not (size.isascii() and size.isdigit() and int(size) > 0):
            why = f"{name} needs a whole number of ranks, 1 or more, or auto; got {size!r}"
        if why:
            problems.append(Problem(f"{_LINE}: --axes {part.strip()}", None, "", why))
        else:
            sizes.append((name, None if size == "auto" else int(size)))
    return tuple(sizes)
