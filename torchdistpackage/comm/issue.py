"""How a collective is issued: compared where that was asked for, recorded, then waited for or not.

One rule: `now` and `later` take the same words, so that each collective is written once.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm import checking
from torchdistpackage.comm.pending import Pending, await_works, failed
from torchdistpackage.comm.record import LINE, calls

Group = dist.ProcessGroup
Result = TypeVar("Result", Tensor, Pending)
Go = Callable[..., Result]
NOTHING = ()
"""Beside shape and dtype there is nothing to agree on, or nobody asks."""


def now(operation: str, group: Group, x, facts, finish, function, *args) -> Tensor:
    """Call `function` and wait; returns `x`, or what `finish` makes of it.

    facts: what all members must agree on, beside shape and dtype.
    """
    if calls.checks:
        checking.agree(operation, group, x, facts)
    call = calls.begin(operation, group, x)
    since_s = calls.wait(call)
    try:
        works = function(*args, group=group)
        if works.__class__ is list:
            await_works(works, call[LINE].limit)
    except RuntimeError as error:
        raise failed(call, error) from error
    calls.end(call, since_s)
    return x if finish is None else finish()


def later(operation: str, group: Group, x, facts, finish, function, *args) -> Pending:
    """Call `function` and leave the waiting to the caller."""
    if calls.checks:
        checking.agree(operation, group, x, facts)
    call = calls.begin(operation, group, x)
    try:
        works = function(*args, group=group, async_op=True)
    except RuntimeError as error:
        raise failed(call, error) from error
    if works.__class__ is list:  # messages (comm/exchange.py), each of which may take the limit
        return Pending(x, works, call, finish, call[LINE].limit)
    return Pending(x, (works,), call, finish)
