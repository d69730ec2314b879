"""`tdp comm`: what the network between ranks delivers, how fast, and in which order it is used.

`tdp comm test` is here: whether every group delivers what is sent, the first command on a cluster.
"""

import os
from typing import Annotated

import typer

from torchdistpackage.cli._common import text_table
from torchdistpackage.cli.comm_bench import bench
from torchdistpackage.cli.comm_lint import lint
from torchdistpackage.cli.comm_ranks import (
    Axes,
    Procs,
    Words,
    parse_target,
    run_ranks,
)
from torchdistpackage.errors import AbsentError, ConfigError, LaunchError
from torchdistpackage.launch.rendezvous import detect
from torchdistpackage.topology.mesh import describe

_TEST = "torchdistpackage.harness.comm_test:run_comm_test"
MIN_MEET_S, PER_TIMEOUT = 10.0, 2.0
"""How long ranks without CONFIG may take to meet, as they start one after the other."""
_COLUMNS = ("group", "groups", "ranks in each", "operations", "ms")


def test(
    words: Words = None,
    axes: Axes = None,
    procs: Procs = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Also test messages between all pairs of ranks.")
    ] = False,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="S", min=1, help="Seconds to wait for a rank."),
    ] = 30.0,
) -> None:
    """Send known data over every group and compare what arrives.

    Under torchrun or srun this process is one rank. Otherwise it starts all ranks here. On an
    error the exit code is 1 and the message names the faulty rank or group.
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
            f"{error.found}; look at their logs, or allow more with --timeout"
        ) from None
    if results is None:
        return
    found, ranks = results[0], "rank" if target.num_ranks == 1 else "ranks"
    rows = [
        (x.name, x.num_groups, x.size, x.num_operations, f"{1000 * x.time_s:.1f}")
        for x in found.rows
    ]
    parts = [f"{target.num_ranks} {ranks}: {describe(target.axes)}"]
    parts += [text_table([_COLUMNS, *rows], num_left=1)] if rows else []
    said = "all groups deliver what was sent" if rows else "one rank has nobody to talk to"
    typer.echo("\n\n".join([*parts, f"{said} ({found.time_s:.2f} s)"]))


test.__test__ = False  # type: ignore[attr-defined]  # not one of pytest's

comm = typer.Typer(
    help="Test, benchmark and check the communication between ranks.", no_args_is_help=True
)
comm.command("test")(test)
comm.command("bench")(bench)
comm.command("lint")(lint)
