"""The arguments that `train` and `plan` share: a file, and what to change in it."""

from typing import Annotated

import typer

PROCS = "launch.local.procs"
"""The key that a number of ranks on the command line stands for."""

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="section.key=value", help="Values that win over the file."),
]
