"""How far texts are tokenized: a bar on a terminal, else a line now and then. No torch."""

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
"""Between lines; what takes less says nothing."""


@contextmanager
def tokenizing(stream: TextIO | None = None) -> Iterator[Progress]:
    """What `tokenized` tells its progress. stream: where it is shown, by default stderr."""
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
    began = said = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said < _LINE_S:
            return
        said = now
        speed = done / 1e6 / (now - began)
        stream.write(f"tokenizing: {done / 1e6:.0f} of {total / 1e6:.0f} MB, {speed:.1f} MB/s\n")
        stream.flush()

    return show
