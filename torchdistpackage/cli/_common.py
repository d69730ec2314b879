"""Arguments, tables and line breaks that commands share."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

PROCS = "launch.local.procs"
"""The key that a number of ranks on the command line stands for."""

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="section.key=value", help="Values that override the file."),
]


def text_table(
    rows: Iterable[Sequence[object]], *, num_left: int = 0, last_left: bool = False
) -> str:
    """Columns two spaces apart, aligned to the right but for the first `num_left` and, if
    `last_left`, the last."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align = [str.ljust if i < num_left else str.rjust for i in range(len(widths))]
    align[-1:] = [str.ljust] if last_left else align[-1:]
    lines = [
        "  ".join(put(cell, width) for put, cell, width in zip(align, row, widths, strict=True))
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def wrap(text: str, indent: str = "  ") -> str:
    """`text`, line by line, in the width of the terminal; continued lines start with `indent`.

    Words longer than a line, such as paths, are kept whole. Without a terminal and without
    COLUMNS the width is 80.
    """
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        for line in text.splitlines()
    )
