"""What runs inside a rank that `launch/workers.py` started: call, then tell the supervisor.

One rule: the supervisor hears of a result or an exception before the process ends, over the private
channel, so that no exit code has to be guessed at and no log parsed.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torchdistpackage.launch.entrypoint import EntryPoint
from torchdistpackage.launch.failure import Failure, from_exception
from torchdistpackage.launch.ipc import Channel, pack, unpack


@dataclass(frozen=True, slots=True)
class Result:
    """What the function returned, pickled: only the caller knows its classes by the right names."""

    value: bytes


def pack_arguments(*args: object, **kwargs: object) -> bytes:
    """Arguments for `call`."""
    return pack((args, kwargs))


def call(reference: EntryPoint, args: bytes, rank: int) -> Result | Failure:
    """Load the function, then its arguments (of `pack_arguments`), and call it."""
    return run_catching(rank, load_and_call, reference, args)


def run_catching(
    rank: int, function: Callable[..., object], *args: object, **kwargs: object
) -> Result | Failure:
    """What `function` returns or how it fails, either of them ready to be sent."""
    try:
        return Result(pack(function(*args, **kwargs)))
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return Result(pack(None))
        return from_exception(rank, socket.gethostname(), os.getpid(), time.time(), error)


def load_and_call(reference: EntryPoint, args: bytes) -> object:
    """What the function returns for these arguments of `pack_arguments`."""
    function = reference.resolve()
    positional, named = cast(tuple[tuple[object, ...], dict[str, object]], unpack(args))
    return function(*positional, **named)


def main(channel: Channel, reference: EntryPoint, args: bytes, rank: int) -> None:
    """Entry point of a rank of `run_local`."""
    outcome = call(reference, args, rank)
    channel.send(outcome)
    if isinstance(outcome, Failure):
        if rank:  # rank 0 shares the caller's terminal, where the supervisor's report ends the run
            sys.stderr.write(outcome.detail + "\n")
        raise SystemExit(outcome.exit_code)
