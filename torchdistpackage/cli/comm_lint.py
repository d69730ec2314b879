"""`tdp comm lint`: whether all ranks of a run make their calls in one order (train/dry_run.py)."""

import os
from typing import Annotated

import typer

from torchdistpackage.cli._common import PROCS, Config, Overrides, wrap_on_terminal
from torchdistpackage.config.load import load
from torchdistpackage.harness.lint.report import LintReport
from torchdistpackage.launch.entrypoint import EntryPoint
from torchdistpackage.launch.rendezvous import detect
from torchdistpackage.topology.mesh import describe
from torchdistpackage.train.plan import Plan, local_procs, make_plan
from torchdistpackage.train.shrink import MOST_PARAMETERS, is_small, shrunk

TRIAL = "torchdistpackage.train.dry_run:trial"
PROVED = "proved: every group sees one order of calls, and no ranks deadlock"


def lint(
    config: Config,
    overrides: Overrides = None,
    world: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help=f"Number of ranks; default: {PROCS}, else the product of the degrees.",
        ),
    ] = None,
    run: Annotated[
        bool | None,
        typer.Option(
            "--run/--no-run",
            help=f"Run two real steps with threads as ranks. Default: if parameters x ranks of the "
            f"shrunk run are at most {MOST_PARAMETERS:,}, and the model is one of this package.",
        ),
    ] = None,
) -> None:
    """Check that all ranks make their calls in one order.

    Such ranks do not deadlock, even on a device that runs the calls of several groups one after
    another. A large run is shrunk to at most 16 ranks, which make the same calls.

    On an error the exit code is 1, and the first mismatch is printed with both stacks. Under a
    launcher rank 0 alone checks.
    """
    if detect(os.environ).rank != 0:
        return
    settings = load(config, overrides or [], world)
    planned = make_plan(settings, world or local_procs(settings), config)
    small = shrunk(planned)
    typer.echo(_axes(planned))
    if small.world_size != planned.world_size:
        typer.echo(f"shrunk to {_axes(small)}")
    trial = EntryPoint.of(TRIAL).resolve()
    if run or (run is None and is_small(small)):
        typer.echo(f"two steps, {small.world_size} threads as ranks")
        _show(trial(small))
        typer.echo(wrap_on_terminal(f"{PROVED} (in two steps)"))
        return
    _show(trial(small, 0))
    typer.echo("steps were not run (--run runs them)")
    typer.echo(wrap_on_terminal(f"{PROVED} (where groups are made)"))


def _axes(plan: Plan) -> str:
    return f"{plan.world_size} ranks: {describe(plan.topology.dense.axes)}"


def _show(report: LintReport) -> None:
    typer.echo("\n".join(f"  {line}" for line in str(report).splitlines()))
    if not report.ok:
        raise typer.Exit(1)
