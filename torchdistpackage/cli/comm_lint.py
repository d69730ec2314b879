"""`tdp comm lint`: whether all ranks of a run make their calls in one order, without a cluster.

One rule: it reports what two proofs found, one on paper for the whole world, one with threads as
ranks that run the real step; neither is this file's.
"""

import os
from typing import Annotated

import typer

from torchdistpackage.cli.arguments import PROCS, Config, Overrides
from torchdistpackage.config.load import load
from torchdistpackage.harness.lint.report import LintReport
from torchdistpackage.launch.entrypoint import EntryPoint
from torchdistpackage.launch.rendezvous import detect
from torchdistpackage.topology.mesh import describe
from torchdistpackage.train.calls import static_report
from torchdistpackage.train.plan import Plan, local_procs, make_plan, num_parameters

TRIAL = "torchdistpackage.train.dry_run:trial"
RUN_UP_TO = 20_000_000
"""Parameters of the model times ranks up to which the steps are run without being asked for."""
MOST_THREADS = 64


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
            help=f"Also run two real steps, ranks as threads; by default if parameters x ranks are "
            f"at most {RUN_UP_TO:,}.",
        ),
    ] = None,
) -> None:
    """Prove that all ranks make their calls in one order.

    No ranks wait for each other in a circle then, also where a device runs what it is given on
    several groups one by one.

    Exit code 1 with the first disagreement and both its stacks. Under a launcher rank 0 does it.
    """
    if detect(os.environ).rank != 0:
        return
    settings = load(config, overrides or [], world)
    planned = make_plan(settings, world or local_procs(settings), config)
    axes = describe(planned.topology.dense.axes)
    typer.echo(f"on paper, {planned.world_size} ranks: {axes}")
    # a later step is the first less its headers: what ends with them ends without them
    paper = static_report(planned)
    _show(paper)
    if run is None:
        run = _is_small(planned)
    if not run:
        typer.echo("steps were not run (--run runs them)")
        typer.echo(_proved("on paper" + ", but for what is not known" * bool(paper.unknown)))
        return
    typer.echo(f"two steps, {planned.world_size} threads as ranks")
    _show(EntryPoint.of(TRIAL).resolve()(planned))
    typer.echo(_proved("on paper and in two steps"))


def _is_small(plan: Plan) -> bool:
    """Whether running takes seconds; of a user's own model nobody knows."""
    work = num_parameters(plan) * plan.world_size
    return plan.shape is not None and work <= RUN_UP_TO and plan.world_size <= MOST_THREADS


def _proved(where: str) -> str:
    return f"proved: every group sees one order of calls, and no ranks wait in a circle ({where})"


def _show(report: LintReport) -> None:
    typer.echo("\n".join(f"  {line}" for line in str(report).splitlines()))
    if not report.ok:
        raise typer.Exit(1)
