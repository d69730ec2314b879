"""`tdp train`: pass the file and its overrides to the job.

The job checks the file before it starts any process, so a mistake costs no time and leaves nothing
behind.
"""

import traceback
from typing import Annotated

import typer

from torchdistpackage.cli._common import PROCS, Config, Overrides
from torchdistpackage.errors import RankError
from torchdistpackage.train import job


def train(
    config: Config,
    overrides: Overrides = None,
    procs: Annotated[
        int | None,
        typer.Option(metavar="N", help=f"Number of processes on this machine; sets {PROCS}."),
    ] = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="auto: resume from the latest checkpoint; never: start anew; PATH: resume from "
            "this checkpoint.",
        ),
    ] = "auto",
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Log the causes of the pipeline bubble; sets log.verbose."
        ),
    ] = False,
) -> None:
    """Train on this machine, or as a rank of torchrun or srun.

    Under torchrun or srun this process is one rank. Otherwise it starts all ranks on this machine.
    """
    changes = list(overrides or [])
    if procs is not None:
        changes.append(f"{PROCS}={procs}")
    if verbose:
        changes.append("log.verbose=true")
    try:
        code = job.launch(config, changes, resume)
    except (EOFError, OSError) as error:
        # typer takes these errors for a closed terminal and would exit without a message.
        raise RankError(traceback.format_exc().rstrip()) from error
    raise typer.Exit(code)
