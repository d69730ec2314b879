"""`tdp comm lint`: whether all ranks of a run make their calls in one order (train/dry_run.py)."""

import os
from typing import Annotated

import typer

from torchdistpackage.cli._common import PROCS, Config, Overrides
from torchdistpackage.config.load import load
from torchdistpackage.harness.lint.report import LintReport
from torchdistpackage.launch.entrypoint import EntryPoint
from torchdistpackage.launch.rendezvous import detect
from torchdistpackage.topology.mesh import describe
from torchdistpackage.train.plan import Plan, local_procs, make_plan
from torchdistpackage.train.shrink import MOST_PARAMETERS, is_small, shrunk

TRIAL = "torchdistpackage.train.dry_run:trial"
PROVED = "proved: every group sees one order of calls, and no ranks wait in a circle"


def lint(
    config: Config,
    overrides: Overrides = None,
    world: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help=f"Ranks; else {PROCS}, else as the degrees ask."),
    ] = None,
    run: Annotated[
        bool | None,
        typer.Option(
            "--run/--no-run",
            help=f"Run two real steps, ranks as threads; by default if parameters x ranks are at "
            f"most {MOST_PARAMETERS:,} once the run is shrunk, of a model of ours.",
        ),
    ] = None,
) -> None:
    """Prove that all ranks make their calls in one order.

    No ranks wait for each other in a circle then, also where a device runs what it is given on
    several groups one by one. A large run is shrunk to 16 ranks, which make the same calls.

    Exit code 1 with the first disagreement and both its stacks. Under a launcher rank 0 does it.
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
        typer.echo(f"{PROVED} (in two steps)")
        return
    _show(trial(small, 0))
    typer.echo("steps were not run (--run runs them)")
    typer.echo(f"{PROVED} (where groups are made)")


def _axes(plan: Plan) -> str:
    return f"{plan.world_size} ranks: {describe(plan.topology.dense.axes)}"


def _show(report: LintReport) -> None:
    typer.echo("\n".join(f"  {line}" for line in str(report).splitlines()))
    if not report.ok:
        raise typer.Exit(1)
