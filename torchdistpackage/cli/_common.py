"""Arguments, lists of problems and line breaks that commands share.

Prose is wrapped everywhere. Results, tables and drawings fit the width of a terminal, and are not
broken when another program reads them.
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
"""The key that --procs on the command line sets."""

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
        help=f"Number of ranks; default: {PROCS}, or as many as the degrees need.",
    ),
]


class ListedIn(AbstractContextManager[None, bool]):
    """Catch the ConfigErrors of a `with` body and add them to a list of problems."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, ConfigErrors):
            self._problems += map(str, error.problems)
        elif isinstance(error, ConfigError):
            self._problems.append(str(error))
        return isinstance(error, ConfigError)


def refusal(command: str, problems: Sequence[str]) -> ConfigErrors:
    """Return one error that lists all `problems` of a command."""
    return ConfigErrors(command, [Problem("", None, "", text) for text in problems])


def wrap(text: str, indent: str = "  ") -> str:
    """Wrap each line of `text` to the width of the terminal; continued lines get `indent`.

    Words longer than a line, such as paths, are not broken. The width is 80 without a terminal,
    unless COLUMNS is set.
    """
    width = shutil.get_terminal_size().columns
    return "\n".join(
        textwrap.fill(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        for line in text.splitlines()
    )


def wrap_on_terminal(text: str) -> str:
    """Wrap `text` on a terminal; return it unchanged when another program reads it."""
    return text if terminal_width() is None else wrap(text)
