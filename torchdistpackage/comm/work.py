"""A call under way, and what becomes of a backend's error.

One rule: whoever waits says so in the record, and a failure carries the operation, its number,
the ranks and what of a schedule it was for, whichever call it surfaced in.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.flight_recorder import (
    ACTION,
    FAILED,
    LINE,
    OPERATION,
    PEER,
    SEQUENCE,
    STATE,
    Call,
    recorder,
)
from torchdistpackage.errors import CommError
from torchdistpackage.schedule.actions import Action


class Work:
    """What a `start_*` function began; `wait()` returns its tensor, which is not ready before.

    On CUDA `wait` makes the current stream wait, not the host.
    """

    __slots__ = ("_call", "_finish", "_limit", "_value", "_works")

    def __init__(
        self,
        value: Tensor,
        works: Sequence[dist.Work] = (),
        call: Call | None = None,
        finish: Callable[[], Tensor] | None = None,
        limit: timedelta | None = None,
    ):
        self._value, self._works, self._call = value, works, call
        self._finish, self._limit = finish, limit

    def __del__(self) -> None:
        call = self._call
        if call is not None and call[STATE] != FAILED and call[PEER] is None and call[LINE].direct:
            call[LINE].left += self._works

    def wait(self) -> Tensor:
        """The result. Safe to call twice.

        Raises:
            CommError: the backend failed, or a peer did not come in time.
        """
        if self._call is not None:
            since_s = recorder.wait(self._call)
            try:
                wait_works(self._works, self._limit)
            except RuntimeError as error:
                raise failed(self._call, error) from error
            recorder.end(self._call, since_s)
            self._works, self._call = (), None
            if self._finish is not None:
                self._value, self._finish = self._finish(), None
        return self._value


def wait_works(works: Sequence[dist.Work], limit: timedelta | None) -> None:
    """Each done within `limit`, or the back end's own."""
    for work in works:
        work.wait() if limit is None else work.wait(limit)


def failed(call: Call, error: Exception) -> CommError:
    """The error of a backend in `call`, with its place."""
    line, call[STATE] = call[LINE], FAILED
    where = f"the {line.axis} group of ranks" if line.axis else "ranks"
    peer = ""
    if call[PEER] is not None:
        peer = f" {'to' if call[OPERATION] == 'send' else 'from'} rank {call[PEER]}"
    action = call[ACTION]
    if isinstance(action, Action):
        action = f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"
    return CommError(
        f"{call[OPERATION]}{peer}{f' for {action}' if action else ''} over {where} {line.ranks} "
        f"failed (number {call[SEQUENCE]}): {error}"
    )


Pending = Work
"""The name of Work before 0.1."""
