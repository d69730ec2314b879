"""Arguments, lists of problems, tables and line breaks that commands share.

Prose wraps everywhere. Results, tables and drawings fit the width of a terminal, and are whole
lines for other programs.
"""

import shutil
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Annotated

import typer

from torchdistpackage.config.errors import ConfigErrors, Problem
from torchdistpackage.errors import ConfigError
from torchdistpackage.text import terminal_width

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
