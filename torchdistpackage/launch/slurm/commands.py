"""Slurm's commands, run as argument lists that always end.

One rule: whatever calls a command takes the runner as an argument, so that it can be tried with
texts that a real Slurm once gave.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchdistpackage.errors import LaunchError

TIMEOUT_S = 60.0
"""A busy controller takes its time; one that is away makes the client wait for longer than this."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended and what it wrote."""

    code: int
    out: str = ""
    err: str = ""

    @property
    def why(self) -> str:
        """The first line of what went wrong."""
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[0] if lines else f"exit code {self.code}"


class Runner(Protocol):
    """Runs a command to its end, and raises a LaunchError only where that could not be."""

    def __call__(self, args: Sequence[str], env: Mapping[str, str] | None = None) -> Ran: ...


class NoAnswer(LaunchError):
    """A command was given up; what it was to do may have been done."""


def run(args: Sequence[str], env: Mapping[str, str] | None = None) -> Ran:
    """Run a command and wait for it; any exit code is an answer.

    env: its whole environment; None: this process's, and times are written in seconds since 1970.

    Raises:
        LaunchError: there is no such command here, or it does not answer (`NoAnswer`).
    """
    try:
        done = subprocess.run(
            list(args),
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"} if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {args[0]} here; run this where Slurm's commands are, on a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(
            f"{' '.join(args[:3])} gave no answer in {TIMEOUT_S:g} s; is the controller away? "
            f"`scontrol ping` tells"
        ) from None
    return Ran(done.returncode, done.stdout, done.stderr)
