"""Arguments and tables that commands share."""

from collections.abc import Iterable, Sequence
from typing import Annotated

import typer

PROCS = "launch.local.procs"
"""The key that a number of ranks on the command line stands for."""

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="section.key=value", help="Values that win over the file."),
]


def text_table(rows: Iterable[Sequence[object]], *, num_left: int = 0) -> str:
    """Columns two spaces apart, the first `num_left` aligned to the left, others to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align = [str.ljust if i < num_left else str.rjust for i in range(len(widths))]
    lines = [
        "  ".join(put(cell, width) for put, cell, width in zip(align, row, widths, strict=True))
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)
