"""`tdp comm`: test, benchmark and check the communication between ranks.

This module has `tdp comm test`, which checks that every group delivers what is sent and is the
first command to run on a cluster, and `tdp comm lint`, which checks that all ranks of a run make
their calls in one order (train/dry_run.py).
"""

import os
from typing import Annotated

import typer

from torchdistpackage.cli._common import Config, Overrides, World, wrap_on_terminal
from torchdistpackage.cli.comm_bench import bench
from torchdistpackage.cli.comm_ranks import Axes, Procs, Words, parse_target, run_ranks
from torchdistpackage.config.load import load
from torchdistpackage.environment.rendezvous import detect
from torchdistpackage.errors import AbsentError, ConfigError, LaunchError
from torchdistpackage.harness.lint.report import LintReport
from torchdistpackage.lazy import resolve
from torchdistpackage.plan.run_plan import Plan, local_procs, make_plan
from torchdistpackage.plan.shrink import MOST_PARAMETERS, is_small, shrunk
from torchdistpackage.text import text_table
from torchdistpackage.topology.mesh import describe

_TEST = "torchdistpackage.harness.comm_test:run_comm_test"
TRIAL = "torchdistpackage.train.dry_run:trial"
PROVED = "proved: every group sees one order of calls, and no ranks deadlock"
MIN_MEET_S, PER_TIMEOUT = 10.0, 2.0
"""Least seconds, and number of timeouts, that ranks get to join if there is no CONFIG."""
_COLUMNS = ("group", "groups", "ranks in each", "operations", "ms")


def test(
    words: Words = None,
    axes: Axes = None,
    procs: Procs = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Also test messages between every two ranks.")
    ] = False,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout", metavar="S", min=1, help="Seconds to wait for a rank in one operation."
        ),
    ] = 30.0,
) -> None:
    """Send known data over every group and compare it with what arrives.

    Under torchrun or srun this process is one rank. Otherwise it starts all ranks on this machine.
    On an error the exit code is 1 and the message names the faulty rank or group.
    """
    rank = detect(os.environ).rank
    try:
        target = parse_target(words or [], axes, procs)
    except ConfigError as error:
        if rank == 0:
            raise
        raise typer.Exit(2) from error
    meet_s = max(MIN_MEET_S, PER_TIMEOUT * timeout_s)
    try:
        results = run_ranks(_TEST, (pairs, timeout_s), target, init_timeout_s=meet_s)
    except AbsentError as error:
        if rank != error.speaker:
            raise typer.Exit(1) from error
        if target.init_timeout_s is not None:
            raise
        raise LaunchError(
            f"{error.found}; look at their logs, or allow more time with --timeout"
        ) from None
    if results is None:
        return
    result, ranks = results[0], "rank" if target.num_ranks == 1 else "ranks"
    rows = [
        (x.name, x.num_groups, x.size, x.num_operations, f"{1000 * x.time_s:.1f}")
        for x in result.rows
    ]
    parts = [f"{target.num_ranks} {ranks}: {describe(target.axes)}"]
    parts += [text_table([_COLUMNS, *rows], num_left=1)] if rows else []
    verdict = "all groups deliver what was sent" if rows else "one rank has no group to test"
    typer.echo("\n\n".join([*parts, f"{verdict} ({result.time_s:.2f} s)"]))


test.__test__ = False  # type: ignore[attr-defined]  # keeps pytest from collecting it


def lint(
    config: Config,
    overrides: Overrides = None,
    world: World = None,
    run: Annotated[
        bool | None,
        typer.Option(
            "--run/--no-run",
            help=f"Run two real steps with threads as ranks. Default: only if the model is built "
            f"in and parameters x ranks of the shrunk run are at most {MOST_PARAMETERS:,}.",
        ),
    ] = None,
) -> None:
    """Check that all ranks make their calls in one order.

    Ranks that do so cannot deadlock, even on a device that runs the calls of several groups one
    after another. A large run is shrunk to at most 16 ranks, which make the same calls.

    On an error the exit code is 1, and the first mismatch is printed with both stacks. Under a
    launcher only rank 0 checks.
    """
    if detect(os.environ).rank != 0:
        return
    settings = load(config, overrides or [], world)
    planned = make_plan(settings, world or local_procs(settings), config)
    small = shrunk(planned)
    typer.echo(_axes(planned))
    if small.world_size != planned.world_size:
        typer.echo(f"shrunk to {_axes(small)}")
    trial = resolve(TRIAL)
    if run or (run is None and is_small(small)):
        typer.echo(f"two steps, {small.world_size} threads as ranks")
        _show(trial(small))
        typer.echo(wrap_on_terminal(f"{PROVED} (in two steps)"))
        return
    _show(trial(small, 0))
    typer.echo(wrap_on_terminal("proved: all ranks create the groups in one order"))
    unknown = "not proved: the calls of a step and of your own code, because no step was run"
    typer.echo(wrap_on_terminal(f"{unknown} (pass --run to run two)"))


def _axes(plan: Plan) -> str:
    return f"{plan.world_size} ranks: {describe(plan.topology.dense.axes)}"


def _show(report: LintReport) -> None:
    typer.echo("\n".join(f"  {line}" for line in str(report).splitlines()))
    if not report.ok:
        raise typer.Exit(1)


comm = typer.Typer(no_args_is_help=True)
comm.command("test")(test)
comm.command("bench")(bench)
comm.command("lint")(lint)
