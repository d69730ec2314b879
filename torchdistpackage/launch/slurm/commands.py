"""Slurm's commands, run as argument lists that always end.

One rule: whatever calls a command takes the runner as an argument, so that it can be tried with
texts that a real Slurm once gave.
"""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchdistpackage.errors import LaunchError

TIMEOUT_S = 60.0
"""A busy controller takes its time; one that is away makes the client wait for longer than this."""


@dataclass(frozen=True, slots=True)
class CompletedCommand:
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

    def __call__(
        self, args: Sequence[str], env: Mapping[str, str] | None = None
    ) -> CompletedCommand: ...


class CommandTimeout(LaunchError):
    """A command was given up; what it was to do may have been done."""


def run(
    args: Sequence[str], env: Mapping[str, str] | None = None, *, timeout_s: float | None = None
) -> CompletedCommand:
    """Run a command and wait for it, TIMEOUT_S if not told otherwise; any exit code is an answer.

    env: its whole environment; None: this process's, and times are written in seconds since 1970.

    Raises:
        LaunchError: there is no such command here, or it does not answer (`CommandTimeout`).
    """
    limit_s = TIMEOUT_S if timeout_s is None else timeout_s
    try:
        done = subprocess.run(
            list(args),
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"} if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {args[0]} here; run this where Slurm's commands are, on a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise CommandTimeout(
            f"{' '.join(args[:3])} gave no answer in {limit_s:g} s; is the controller away? "
            f"`scontrol ping` tells"
        ) from None
    return CompletedCommand(done.returncode, done.stdout, done.stderr)


def limited(total_s: float) -> Runner:
    """A runner whose commands have `total_s` from now on, all together."""
    until_s = time.monotonic() + total_s

    def run_within(args: Sequence[str], env: Mapping[str, str] | None = None) -> CompletedCommand:
        return run(args, env, timeout_s=max(until_s - time.monotonic(), 0.0))

    return run_within
