"""How a collective is issued: compared where that was asked for, recorded, then waited for or not.

One rule: `run_sync` and `run_async` take the same words, so that each collective is written once.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm import debug_checks
from torchdistpackage.comm.flight_recorder import LINE, recorder
from torchdistpackage.comm.work import Work, failed, wait_works

Group = dist.ProcessGroup
Result = TypeVar("Result", Tensor, Work)
IssueFn = Callable[..., Result]
NO_FACTS = ()
"""Beside shape and dtype there is nothing to agree on, or nobody asks."""


def run_sync(operation: str, group: Group, x, facts, finish, function, *args) -> Tensor:
    """Call `function` and wait; returns `x`, or what `finish` makes of it.

    facts: what all members must agree on, beside shape and dtype.
    """
    if recorder.checks:
        debug_checks.agree(operation, group, x, facts)
    call = recorder.begin(operation, group, x)
    since_s = recorder.wait(call)
    try:
        works = function(*args, group=group)
        if works.__class__ is list:
            wait_works(works, call[LINE].limit)
    except RuntimeError as error:
        raise failed(call, error) from error
    recorder.end(call, since_s)
    return x if finish is None else finish()


def run_async(operation: str, group: Group, x, facts, finish, function, *args) -> Work:
    """Call `function` and leave the waiting to the caller."""
    if recorder.checks:
        debug_checks.agree(operation, group, x, facts)
    call = recorder.begin(operation, group, x)
    try:
        works = function(*args, group=group, async_op=True)
    except RuntimeError as error:
        raise failed(call, error) from error
    if (
        works.__class__ is list
    ):  # messages (comm/transport/pairwise.py), each of which may take the limit
        return Work(x, works, call, finish, call[LINE].limit)
    return Work(x, (works,), call, finish)
