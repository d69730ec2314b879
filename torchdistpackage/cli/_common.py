"""Arguments, lists of problems, tables and line breaks that commands share.

Prose wraps everywhere. Results, tables and drawings fit the width of a terminal, and are whole
lines for other programs.
"""

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Annotated

import typer

from torchdistpackage.config.errors import ConfigErrors, Problem
from torchdistpackage.errors import ConfigError

PROCS = "launch.local.procs"
"""The key that a number of ranks on the command line stands for."""

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="section.key=value", help="Values that override the file."),
]
World = Annotated[
    int | None,
    typer.Option(
        "--procs",
        "--world",
        metavar="N",
        min=1,
        help=f"Number of ranks; default: {PROCS}, else the product of the degrees.",
    ),
]


class ListedIn(AbstractContextManager[None, bool]):
    """Adds what its body refuses to a list of problems; the program goes on after it."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, ConfigErrors):
            self._problems += map(str, error.problems)
        elif isinstance(error, ConfigError):
            self._problems.append(str(error))
        return isinstance(error, ConfigError)


def refusal(command: str, problems: Sequence[str]) -> ConfigErrors:
    """The error that lists all of them."""
    return ConfigErrors(command, [Problem("", None, "", text) for text in problems])


def terminal_width() -> int | None:
    """Columns of the terminal that the output goes to, or COLUMNS; None: it goes elsewhere."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return None


def text_table(
    rows: Iterable[Sequence[object]],
    *,
    num_left: int = 0,
    last_left: bool = False,
    num_keys: int = 0,
) -> str:
    """Columns two spaces apart, aligned to the right but for the first `num_left` and, if
    `last_left`, the last.

    num_keys: if not 0, a table wider than the terminal is printed in blocks of columns, one below
    another, each of which begins with the first `num_keys` columns.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    align = [str.ljust if i < num_left else str.rjust for i in range(len(widths))]
    align[-1:] = [str.ljust] if last_left else align[-1:]
    blocks = _blocks(widths, num_keys) if num_keys else [range(len(widths))]
    texts = (
        "\n".join("  ".join(align[i](row[i], widths[i]) for i in block).rstrip() for row in cells)
        for block in blocks
    )
    return "\n\n".join(texts)


def _blocks(widths: Sequence[int], num_keys: int) -> list[list[int]]:
    """The columns of each block; one that has only the keys takes a column of any width."""
    keys, limit = list(range(num_keys)), terminal_width() or math.inf
    blocks = [list(keys)]
    for i in range(num_keys, len(widths)):
        width = sum(widths[k] + 2 for k in blocks[-1]) + widths[i]
        if width > limit and len(blocks[-1]) > num_keys:
            blocks.append(list(keys))
        blocks[-1].append(i)
    return blocks


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


def wrap_on_terminal(text: str) -> str:
    """`wrap`, but whole lines where other programs read them."""
    return text if terminal_width() is None else wrap(text)
