"""`tdp profile`: summarize and draw the trace of a run."""

from pathlib import Path
from typing import Annotated

import typer

from torchdistpackage.cli._common import ListedIn, refusal
from torchdistpackage.errors import ConfigError
from torchdistpackage.text import text_table
from torchdistpackage.train.trace_file import TRACE, png, read_trace, summary


def profile(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help=f"Folder of a run with a {TRACE}, or that file itself."),
    ],
    png_file: Annotated[
        Path | None,
        typer.Option(
            "--png", metavar="FILE", help="Write a drawing to FILE (PNG); needs matplotlib."
        ),
    ] = None,
) -> None:
    """Summarize the trace of a run's profiled steps.

    The key train.profile.steps selects the steps. The table has a row for each rank: the shares of
    time in which it computed, waited for pipeline messages, and waited for the calls of each group.
    Open the trace itself in ui.perfetto.dev.
    """
    problems, trace, written = list[str](), None, ""
    with ListedIn(problems):
        trace = read_trace(run)
    if png_file is not None and not png_file.parent.is_dir():
        problems.append(
            f"--png {png_file} cannot be written: there is no folder {png_file.parent}; create it "
            f"or name another"
        )
    if problems or trace is None:
        raise refusal("tdp profile", problems)
    if png_file is not None:
        content = png(trace)
        try:
            png_file.write_bytes(content)
        except OSError as error:
            raise ConfigError(
                f"--png {png_file} cannot be written: {error.strerror}; name another file"
            ) from error
        written = f"\nwrote {png_file}"
    steps = ", ".join(map(str, trace.steps))
    head = f"{trace.run}: {trace.schedule}, {len(trace.ranks)} ranks, steps {steps}"
    typer.echo(f"{head}\n{text_table(summary(trace), num_keys=1)}{written}")
