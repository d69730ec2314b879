"""`tdp train`: hands the file and the changes to it over to the job.

The job starts nothing before it knows the file to be right, so a mistake costs no
time and leaves nothing behind.
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
        int | None, typer.Option(metavar="N", help=f"Number of local processes; sets {PROCS}.")
    ] = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH", help="Resume from the latest checkpoint, none, or PATH."
        ),
    ] = "auto",
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Print the causes of the pipeline bubble; sets log.verbose."
        ),
    ] = False,
) -> None:
    """Train on local processes, or as a rank of torchrun or srun.

    Under torchrun or srun this process is one rank. Otherwise it starts all ranks here.
    """
    changes = list(overrides or [])
    if procs is not None:
        changes.append(f"{PROCS}={procs}")
    if verbose:
        changes.append("log.verbose=true")
    try:
        code = job.launch(config, changes, resume)
    except (EOFError, OSError) as error:
        # typer takes these for a closed terminal, and would end without a word.
        raise RankError(traceback.format_exc().rstrip()) from error
    raise typer.Exit(code)
