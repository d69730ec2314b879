"""The progress of tokenizing: a bar on a terminal, else a line now and then. No torch."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar

from torchdistpackage.data.tokens.token_workers import Progress

_LINE_S = 10.0
"""Seconds between lines; a shorter tokenization prints none."""


@contextmanager
def tokenizing(stream: TextIO | None = None) -> Iterator[Progress]:
    """Show progress; yields the function that `tokenized` calls. stream: by default stderr."""
    stream = sys.stderr if stream is None else stream
    console = Console(file=stream)
    if not console.is_terminal:
        yield _lines(stream)
        return
    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Bar(TextColumn("tokenizing"), *columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, visible=False)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        yield show


def _lines(stream: TextIO) -> Progress:
    began_s = last_line_s = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last_line_s
        now_s = time.monotonic()
        if now_s - last_line_s < _LINE_S:
            return
        last_line_s = now_s
        speed = done / 1e6 / (now_s - began_s)
        stream.write(f"tokenizing: {done / 1e6:.0f} of {total / 1e6:.0f} MB, {speed:.1f} MB/s\n")
        stream.flush()

    return show
