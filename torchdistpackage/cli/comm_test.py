"""`tdp comm test`: whether every group delivers what is sent. The first command on a cluster.

One rule: what is wrong is said once, whoever started the ranks and whichever of them still runs.
"""

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from torchdistpackage.cli._common import Axes, CommTarget, Procs, Words, parse_target
from torchdistpackage.errors import AbsentError, CommError, ConfigError, LaunchError, RankError
from torchdistpackage.harness.comm_test_report import CommTestError
from torchdistpackage.harness.run_on_topology import run_on_topology
from torchdistpackage.launch.rendezvous import detect
from torchdistpackage.topology.mesh import describe

_TEST = "torchdistpackage.harness.comm_test:test_and_note"
MIN_MEET_S, PER_TIMEOUT = 10.0, 2.0
"""How long ranks without CONFIG may take to meet, as they start one after the other."""
_COLUMNS = ("group", "groups", "ranks in each", "operations", "ms")


def test(
    words: Words = None,
    axes: Axes = None,
    procs: Procs = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Also messages between all pairs of ranks.")
    ] = False,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="S", min=1, help="Wait for a rank so many seconds."),
    ] = 30.0,
) -> None:
    """Send known data over every group, and compare what arrives.

    Under torchrun or srun this process is one of the ranks; else it starts them. Ends with 1 and
    the culprit where something is wrong.
    """
    try:
        want = parse_target(words or [], axes, procs)
    except ConfigError as error:
        if detect(os.environ).rank == 0:
            raise
        raise typer.Exit(2) from error
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "verdict"
        results = _run(want, pairs, timeout_s, note)
    if results is not None:
        typer.echo(_table(describe(want.axes), want.num_ranks, results))


test.__test__ = False  # type: ignore[attr-defined]  # not one of pytest's


def _run(want: CommTarget, pairs: bool, timeout_s: float, note: Path) -> list[Any] | None:
    try:
        return run_on_topology(
            _TEST,
            (pairs, timeout_s, str(note)),
            axes=want.axes,
            procs=want.num_ranks,
            expert=want.expert,
            init_timeout_s=want.init_timeout_s or max(MIN_MEET_S, PER_TIMEOUT * timeout_s),
        )
    except AbsentError as error:
        if detect(os.environ).rank != error.speaker:
            raise typer.Exit(1) from error
        if want.init_timeout_s is not None:
            raise
        raise LaunchError(
            f"{error.found}; look at their logs, or allow more with --timeout"
        ) from None
    except CommTestError as error:
        # this process is one of the ranks, which all were told the same
        if error.speaker in (None, detect(os.environ).rank):
            raise
        raise typer.Exit(1) from error
    except RankError as error:
        if not note.exists():
            raise
        how = str(error).partition("\n")[0]  # that it was stopped or killed only the parent knows
        more = "" if CommTestError.__name__ in how else f"\n{how}"
        raise CommError(note.read_text(encoding="utf-8") + more) from None


def _table(axes: str, num_ranks: int, results: list[Any]) -> str:
    test = results[0]
    rows: list[tuple[str, ...]] = [_COLUMNS]
    for row in test.rows:
        counts = (row.num_groups, row.size, row.num_operations)
        rows.append((row.name, *map(str, counts), f"{1000 * row.time_s:.1f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{num_ranks} {'rank' if num_ranks == 1 else 'ranks'}: {axes}", ""]
    for first, *others in rows if test.rows else ():
        cells = [first.ljust(widths[0]), *(map(str.rjust, others, widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    lines += [""] if test.rows else []
    said = "all groups deliver what was sent" if test.rows else "one rank has nobody to talk to"
    return "\n".join([*lines, f"{said} ({test.time_s:.2f} s)"])
