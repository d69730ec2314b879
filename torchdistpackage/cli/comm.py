"""`tdp comm`: what the network between ranks delivers, how fast, and in which order it is used."""

import typer

from torchdistpackage.cli.comm_bench import bench
from torchdistpackage.cli.comm_lint import lint
from torchdistpackage.cli.comm_test import test

comm = typer.Typer(
    help="Test, measure and check the communication between ranks.", no_args_is_help=True
)
comm.command("test")(test)
comm.command("bench")(bench)
comm.command("lint")(lint)
