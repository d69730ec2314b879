"""`tdp profile`: the trace of a run, summed up and drawn."""

from pathlib import Path
from typing import Annotated

import typer

from torchdistpackage.cli._common import ListedIn, refusal
from torchdistpackage.errors import ConfigError
from torchdistpackage.text import text_table
from torchdistpackage.train.trace_file import TRACE, png, read_trace, summary


def profile(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help=f"Run folder with a {TRACE}, or that file itself.")
    ],
    png_file: Annotated[
        Path | None,
        typer.Option("--png", metavar="FILE", help="Write a drawing (PNG); needs matplotlib."),
    ] = None,
) -> None:
    """Summarise the trace of a run's profiled steps.

    The key train.profile.steps selects the steps. For each rank the table has the share of time
    spent in computation, in waiting for pipeline messages, and in waiting for the calls of each
    group. Open the trace itself in ui.perfetto.dev.
    """
    problems, trace, written = list[str](), None, ""
    with ListedIn(problems):
        trace = read_trace(run)
    if png_file is not None and not png_file.parent.is_dir():
        problems.append(f"--png {png_file} cannot be written: there is no folder for it")
    if problems or trace is None:
        raise refusal("tdp profile", problems)
    if png_file is not None:
        content = png(trace)
        try:
            png_file.write_bytes(content)
        except OSError as error:
            raise ConfigError(f"--png {png_file} cannot be written: {error.strerror}") from error
        written = f"\nwrote {png_file}"
    steps = ", ".join(map(str, trace.steps))
    head = f"{trace.run}: {trace.schedule}, {len(trace.ranks)} ranks, steps {steps}"
    typer.echo(f"{head}\n{text_table(summary(trace), num_keys=1)}{written}")
