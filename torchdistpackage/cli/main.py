"""`tdp`: find the command, run it, and return an exit code.

Only the module of the requested command is imported, so that `tdp plan` does not wait for what
training imports, and help imports no command at all. A mistake of the user prints its message and
exits with 2, a run that failed prints its report and exits with 1. A traceback of this process is
a bug in this package.
"""

import os
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from importlib.metadata import version
from typing import Annotated, Any, TextIO, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_install_completion_arguments

from torchdistpackage.bounded import printable
from torchdistpackage.cli._common import wrap
from torchdistpackage.errors import (
    ConfigError,
    HeldError,
    LayoutError,
    ScheduleError,
    TopologyError,
    TorchDistError,
)
from torchdistpackage.lazy import resolve

COMMANDS = {
    "init": "Write the YAML file of a run, from five questions or options.",
    "train": "Train on this machine, or as a rank of torchrun or srun.",
    "submit": "Submit a run, or a sweep of runs, to Slurm.",
    "jobs": "List (also: tdp runs), show, follow, cancel and resubmit runs.",
    "report": "Write one HTML file that shows a run, or compares several.",
    "watch": "Follow a run in the terminal.",
    "plan": "Summarize a run's layout, memory, schedule and communication.",
    "data": "Prepare the training data of a run.",
    "reference": "Write the log-probabilities of a reference or a teacher to a file.",
    "generate": "Continue prompts with a trained model, on any layout.",
    "eval": "Measure the loss and perplexity of a trained model, on any layout.",
    "export": "Export the latest checkpoint for transformers or peft.",
    "checkpoint": "List, show, verify, compare, convert and prune checkpoints.",
    "comm": "Test, benchmark and check the communication between ranks.",
    "prove": "Show that a run's layouts compute what one process does.",
    "schedule": "Show a pipeline schedule and its bubble.",
    "profile": "Summarize the trace of a run's profiled steps.",
    "site": "Ask the Slurm site once what it has, demands and forbids.",
    "doctor": "Print a report about this machine, to ask for help with.",
    "schema": "Print the JSON schema of the YAML file.",
}
"""Command, a function or group of commands in the module of that name -> its line in the help."""

_EARLIER_OPTIONS = {
    ("comm", "bench"): {"--alone": "--isolated", "--over": "--axis"},
    ("jobs", "monitor"): {"--every": "--interval", "--wait": "--delay"},
    ("submit",): {"--parallel": "--max-parallel"},
}
"""Command -> option names before 0.1, which still work -> their names today."""

_REFUSALS = (ConfigError, TopologyError, LayoutError, ScheduleError, HeldError)
_REFUSED, _FAILED, _INTERRUPTED = 2, 1, 130
_AS_IT_IS = {"generate", "watch"}
"""Commands whose output needs control characters: a model's text, or a display."""
_FOLLOWS = {"logs", "--follow"}
"""Arguments with which a command prints the log of a job, unchanged."""


def main(argv: list[str] | None = None) -> int:
    """Run `tdp` with the arguments after its name, and return the exit code.

    argv: None takes the arguments of this process, and ends the process if it is a failed rank.
    """
    code = _run(sys.argv[1:] if argv is None else argv)
    if argv is None and code:
        _end_rank(code)
    return code


def _end_rank(code: int) -> None:
    """Exit at once if this process is still one of the ranks.

    A thread may be stuck in a call of the back end, and the interpreter's own exit would wait for
    it. All messages have been printed by now.
    """
    comm = sys.modules.get("torchdistpackage.comm.creation")
    if comm is not None and comm.is_joined():
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


class _Printable:
    """A stream that writes characters which control a terminal, such as U+202E, as escapes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _run(args: list[str]) -> int:
    args = _of_today(args)
    # A shell that completes a line gives it in a variable: `tdp plan --pr`.
    words = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()[1:]
    words = words if "_TDP_COMPLETE" in os.environ else args
    command = next((argument for argument in words if not argument.startswith("-")), "")
    with ExitStack() as stack:
        if command != "train":  # its ranks write to both streams themselves
            stack.enter_context(redirect_stderr(cast(TextIO, _Printable(sys.stderr))))
            if command not in _AS_IT_IS and not _FOLLOWS & set(args):
                stack.enter_context(redirect_stdout(cast(TextIO, _Printable(sys.stdout))))
        return _run_command(command, args)


def _run_command(command: str, args: list[str]) -> int:
    try:
        _command(command)(args, prog_name="tdp")
    except SystemExit as end:  # how typer ends, always with a number
        if isinstance(end.code, int):
            return end.code
        raise
    except TorchDistError as error:
        text = printable("\n".join([f"tdp: {error}", *getattr(error, "__notes__", ())]))
        print(wrap(text, indent="    ") if sys.stderr.isatty() else text, file=sys.stderr)
        return _REFUSED if isinstance(error, _REFUSALS) else _FAILED
    except PermissionError as error:
        if error.filename is None:
            raise
        hint = "ask its owner for the right to read and search it"
        print(printable(f"tdp: {error.filename}: {error.strerror}; {hint}"), file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _of_today(args: list[str]) -> list[str]:
    if args[:1] == ["runs"]:
        return ["jobs", "ls", *args[1:]]
    if args[:1] == ["parity"]:
        return ["prove", *args[1:]]
    for command, names in _EARLIER_OPTIONS.items():
        if tuple(args[: len(command)]) == command:
            parts = [arg.partition("=") for arg in args]
            return [f"{names.get(name, name)}{equals}{value}" for name, equals, value in parts]
    return args


def _version(is_requested: bool) -> None:
    if is_requested:
        print(", ".join(f"{name} {version(name)}" for name in ("torchdistpackage", "torch")))
        raise typer.Exit


def _command(command_name: str) -> TyperGroup:
    """Return `tdp` with the command `command_name`; of others it has only their line of help."""
    # Plain help and plain tracebacks: importing rich takes longer than making a plan.
    app = typer.Typer(
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        no_args_is_help=True,
    )

    @app.callback()
    def tdp(
        _: Annotated[
            bool,
            typer.Option("--version", is_eager=True, callback=_version, help="Print versions."),
        ] = False,
    ) -> None:
        """Train with mixed parallelism from one YAML file, locally or under Slurm."""

    if command_name in COMMANDS:
        command = resolve(f"torchdistpackage.cli.{command_name}:{command_name}")
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=command_name, help=COMMANDS[command_name])
        else:
            app.command(command_name)(command)
    group = typer.main.get_group(app)
    group.params.extend(get_install_completion_arguments())  # get_group leaves them out
    listed = {name: TyperCommand(name, help=text) for name, text in COMMANDS.items()}
    group.commands = listed | group.commands
    return group


if __name__ == "__main__":
    sys.exit(main())
