"""`tdp report`: write one HTML file that shows a run, or compares several."""

import time
from pathlib import Path
from typing import Annotated

import typer

from torchdistpackage.cli._common import ListedIn, refusal
from torchdistpackage.report.page import plotly_script, write_report
from torchdistpackage.report.run import Run
from torchdistpackage.run_files import REPORT
from torchdistpackage.text import size_text


def report(
    runs: Annotated[
        list[Path], typer.Argument(readable=False, metavar="RUN...", help="Run folders.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help=f"File to write; default: {REPORT} in the folder of the run, or in the current "
            "folder if there are several runs.",
        ),
    ] = None,
    peak_tflops: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            min=0.001,
            help="Peak TFLOP/s of one device, for the utilization; default: by the device's name.",
        ),
    ] = None,
) -> None:
    """Write one HTML file that shows a run, or compares several.

    The file needs no network and no server. It shows the loss and other curves, what the time of a
    step was spent on, memory, slow ranks, the pipeline's timeline, every start and how it ended,
    checkpoints and the configuration. For several runs it also shows a table of the keys that
    differ. A run that is still running, damaged or of an earlier version is shown as far as
    possible.
    """
    problems: list[str] = []
    for folder in runs:
        with ListedIn(problems):
            Run(folder)
    with ListedIn(problems):
        plotly_script()
    path = out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT))
    # a missing run has been reported above
    if not path.parent.is_dir() and (out is not None or runs[0].is_dir()):
        problems.append(
            f"{path} cannot be written: there is no folder {path.parent}; create it or name another"
        )
    if problems:
        raise refusal("tdp report", problems)
    shown = write_report(runs, path, time.time(), peak_tflops and peak_tflops * 1e12)
    for data in shown:
        for note in data.notes:
            typer.echo(f"note: {data.name}: {note}", err=True)
    typer.echo(f"wrote {path} ({size_text(path.stat().st_size)})")
