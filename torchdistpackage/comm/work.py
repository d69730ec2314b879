"""Issue calls, and represent a call in flight as `Work`.

Every wait is noted in the flight recorder. A failure carries the operation, its number, the ranks
and the schedule's action, whichever call it surfaced in. `run_sync` and `run_async` take the same
arguments, so that each collective is written once.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm import debug_checks
from torchdistpackage.comm.flight_recorder import (
    ACTION,
    DTYPE,
    FAILED,
    GROUP,
    OPERATION,
    PEER,
    SEQUENCE,
    SHAPE,
    STATE,
    WAITING,
    Call,
    dtype_name,
    recorder,
    returned,
)
from torchdistpackage.errors import CommError
from torchdistpackage.schedule.actions import Action

Group = dist.ProcessGroup
_ADVICE = " This is typically caused by a remote worker"
"""Beginning of the general advice that gloo of torch 2.13 adds when a peer is lost."""


class Work:
    """A call in flight, begun with `async_op` or a post; `wait()` returns its tensor, ready to use.

    On CUDA `wait` makes the current stream wait, not the host. calls: one for all `works`, or one
    for each. keep: objects that must stay in memory until then.
    """

    __slots__ = ("_calls", "_finish", "_keep", "_limit", "_value", "_works")

    def __init__(
        self,
        value: Tensor | None = None,
        works: Sequence[dist.Work] = (),
        calls: Sequence[Call] = (),
        finish: Callable[[], Tensor] | None = None,
        limit: timedelta | None = None,
        keep: object = None,
    ):
        self._value, self._works, self._calls = value, works, calls
        self._finish, self._limit, self._keep = finish, limit, keep

    def __del__(self) -> None:
        """Hand unawaited works to the group, which settles them before its next call."""
        if self._calls:
            call = self._calls[0]
            if call[PEER] is None and call[STATE] != FAILED and call[GROUP].direct:
                call[GROUP].left += self._works

    def forget(self) -> None:
        """Drop the reference to the tensors: a queued transport keeps tensors in transit alive."""
        self._keep = None

    def wait(self) -> Tensor:
        """Wait for the call and return its tensor; None for posted messages. Safe to call twice.

        Raises:
            CommError: the backend failed, or a peer did not come in time.
        """
        if self._calls:
            call, limit, since_s = self._calls[0], self._limit, recorder.clock_s()
            try:
                if len(self._calls) == 1:
                    call[STATE] = WAITING
                    wait_works(self._works, self._limit)
                else:
                    # NCCL runs a batch as one, and may give one work for all of its messages
                    for call, work in zip(self._calls, self._works, strict=False):
                        call[STATE] = WAITING
                        work.wait() if limit is None else work.wait(limit)
                        call[STATE] = returned(call[GROUP])
            except RuntimeError as error:
                raise failed(call, error) from error
            recorder.end(call, since_s)
            self._works, self._calls, self._keep = (), (), None
            if self._finish is not None:
                self._value, self._finish = self._finish(), None
        return self._value  # type: ignore[return-value]


Pending = Work
"""The name of Work before 0.1."""

NO_FACTS = ()
"""Facts of a call without any: ranks compare only shape and dtype, or the debug mode is off."""


def run_sync(operation: str, group: Group, x, facts, finish, function, *args) -> Tensor:
    """Call `function` and wait; return `x`, or the result of `finish`.

    facts: values on which all members must agree besides shape and dtype.
    """
    if recorder.checks:
        debug_checks.agree(operation, group, x, facts)
    call = recorder.begin(operation, group, x)
    call[STATE], since_s = WAITING, recorder.clock_s()
    try:
        works = function(*args, group=group)
        if works.__class__ is list:
            wait_works(works, call[GROUP].limit)
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
    if works.__class__ is list:  # of transport/pairwise.py; each message may take the limit
        return Work(x, works, (call,), finish, call[GROUP].limit)
    return Work(x, (works,), (call,), finish)


def wait_works(works: Sequence[dist.Work], limit: timedelta | None) -> None:
    """Wait for each of the works within `limit`; None: the back end's own limit."""
    for work in works:
        work.wait() if limit is None else work.wait(limit)


def failed(call: Call, error: Exception) -> CommError:
    """Return a CommError that names the call, its ranks and its action."""
    state, call[STATE] = call[GROUP], FAILED
    where = f"the {state.axis} group of ranks" if state.axis else "ranks"
    peer = ""
    if call[PEER] is not None:
        peer = f" {'to' if call[OPERATION] == 'send' else 'from'} rank {call[PEER]}"
    action = call[ACTION]
    if isinstance(action, Action):
        action = f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"
    # the report says the same better, and names the rank that is gone
    reason, _, _ = str(error).partition(_ADVICE)
    return CommError(
        f"{call[OPERATION]}{peer}{f' for {action}' if action else ''} over {where} {state.ranks} "
        f"failed (number {call[SEQUENCE]}{_tensor(call)}): {reason}"
    )


def _tensor(call: Call) -> str:
    """Return `, float32[4]`, by which a call that differs from those of its peers is found."""
    if call[DTYPE] is None:
        return ""
    return f", {dtype_name(call[DTYPE])}{list(call[SHAPE])}"
