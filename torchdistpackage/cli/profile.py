"""`tdp profile`: the trace of a run, summed up and drawn."""

from pathlib import Path
from typing import Annotated

import typer

from torchdistpackage.cli._common import text_table
from torchdistpackage.errors import ConfigError
from torchdistpackage.train.trace_file import TRACE, png, read_trace, summary


def profile(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help=f"Run folder with a {TRACE}, or that file.")
    ],
    png_file: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw it (matplotlib).")
    ] = None,
) -> None:
    """Show what the ranks of a run did in its profiled steps (train.profile.steps).

    Shares are of the time of the steps: computing, waiting for messages of the schedule, and
    waiting for calls of each group. The trace itself opens in ui.perfetto.dev.
    """
    trace = read_trace(run)
    written = ""
    if png_file is not None:
        content = png(trace)
        try:
            png_file.write_bytes(content)
        except OSError as error:
            raise ConfigError(f"--png {png_file} cannot be written: {error.strerror}") from error
        written = f"\nwrote {png_file}"
    steps = ", ".join(map(str, trace.steps))
    head = f"{trace.run}: {trace.schedule}, {len(trace.ranks)} ranks, steps {steps}"
    typer.echo(f"{head}\n{text_table(summary(trace))}{written}")
