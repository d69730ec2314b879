"""The flight recorder: the last calls of this rank, and NCCL's own record, for hang reports.

Recording a call only appends a list to a deque, because it delays every call; `snapshot` makes
numbers and texts later. A call is `WAITING` while it blocks the host. A device queue does not block
the host, so a call that has returned counts as issued.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.group_state import GroupState, drop_all_states, known_states, state_of

SIZE = 512
"""Number of calls that are kept."""

ISSUED, WAITING, DONE, FAILED = "issued", "waiting", "done", "failed"

Call = list[Any]
"""A recorded call: a list with the indices below. Only `FlightRecorder` writes and reads it."""
GROUP, OPERATION, SEQUENCE, SHAPE, DTYPE, PEER, ACTION, BEGAN_S, STATE = range(9)

_monotonic_s = time.monotonic


class RecorderSnapshot(TypedDict):
    """The last calls of this rank, oldest first, as JSON values.

    groups: `ranks`, `axis`, and numbers of collectives `issued` and `done` (None if only the device
        knows).
    peers: numbers of messages `sent` to and `received` from global rank `peer` in groups[`group`].
    calls: see `FlightRecorder.begin`. `sequence` counts collectives of the group, or messages in
        one direction with `peer`.
    """

    time_s: float
    step: int
    phase: str
    groups: list[dict[str, Any]]
    peers: list[dict[str, Any]]
    calls: list[dict[str, Any]]


class FlightRecorder:
    """A recorder of this rank's calls. Use this module's instance, `recorder`.

    phase: what this rank does between calls ("data", "forward", ...). step: step of the run.
    action: the schedule's action that runs, or whose messages are being posted.
    waited_s: seconds that the host has been blocked in calls; it only grows.
    clock_s: clock that measures this.
    checks: compare what the members of a group are about to do (comm/debug_checks.py).
    ended: None, or a list that gets each call when the host no longer waits for it, with the time
        and how long it waited.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.step = 0
        self.action: object | None = None
        self.waited_s = 0.0
        self.clock_s: Callable[[], float] = _monotonic_s
        self.checks = False
        self.ended: list[tuple[Call, float, float]] | None = None
        self._ring: deque[Call] = deque(maxlen=SIZE)

    def begin(self, operation: str, group: dist.ProcessGroup, x: Tensor | None) -> Call:
        """Record a collective that is about to be issued."""
        state = state_of(group)
        state.issued = sequence = state.issued + 1
        shape, dtype = (None, None) if x is None else (x.shape, x.dtype)
        call = [state, operation, sequence, shape, dtype, None, self.action, _monotonic_s(), ISSUED]
        self._ring.append(call)
        return call

    def begin_message(
        self, operation: str, state: GroupState, x: Tensor, peer: int, action: object
    ) -> Call:
        """Record that `x` is about to be sent to, or received from, global rank `peer`."""
        counts = state.sent if operation == "send" else state.received
        counts[peer] = sequence = counts.get(peer, 0) + 1
        began_s = _monotonic_s()
        call = [state, operation, sequence, x.shape, x.dtype, peer, action, began_s, ISSUED]
        self._ring.append(call)
        return call

    def end(self, call: Call, since_s: float) -> None:
        """Record that the host continues after `call`, which blocked it since `since_s`."""
        group = call[GROUP]
        call[STATE] = ISSUED if group.queued else DONE  # `returned`
        if call[PEER] is None:
            group.done += 1
        waited_s = self.clock_s() - since_s
        self.waited_s += waited_s
        group.waited_s += waited_s
        if self.ended is not None:
            self.ended.append((call, _monotonic_s(), waited_s))

    @contextmanager
    def apart(self) -> Generator[None]:
        """Count what happens inside as waiting, because it is work that ranks have unequal shares
        of, such as writing files.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # beside the steps, whose waits are counted here
            return
        began_s, waited_s = self.clock_s(), self.waited_s
        try:
            yield
        finally:
            # waits inside are in it already
            self.waited_s = waited_s + self.clock_s() - began_s

    def forget_all(self) -> None:
        """Forget everything that belongs to a world that has ended."""
        drop_all_states()
        self.clock_s, self.checks, self.ended = _monotonic_s, False, None

    def snapshot(self, num: int = 64) -> RecorderSnapshot:
        """Return the last `num` calls, and this rank's position in each group; safe in any
        thread.
        """
        groups, now_s = known_states(), _monotonic_s()
        index = {id(group): i for i, group in enumerate(groups)}
        return {
            "time_s": time.time(),
            "step": self.step,
            "phase": self.phase,
            "groups": [
                {
                    "ranks": list(group.ranks),
                    "axis": group.axis,
                    "issued": group.issued,
                    "done": None if group.queued else group.done,
                }
                for group in groups
            ],
            "peers": [
                {
                    "group": i,
                    "peer": peer,
                    "sent": group.sent.get(peer, 0),
                    "received": group.received.get(peer, 0),
                }
                for i, group in enumerate(groups)
                for peer in sorted({*group.sent, *group.received})
            ],
            "calls": [
                {
                    "group": index[id(group)],
                    "operation": operation,
                    "sequence": sequence,
                    "shape": [] if shape is None else list(shape),
                    "dtype": "" if dtype is None else dtype_name(dtype),
                    "peer": peer,
                    "action": None if action is None else str(action),
                    "state": state,
                    "age_s": now_s - began_s,
                }
                for group, operation, sequence, shape, dtype, peer, action, began_s, state in list(
                    self._ring
                )[-num:]
                if id(group) in index
            ],
        }


def returned(group: GroupState) -> str:
    """Return the state of a call once the host continues; on a queue the call may still run."""
    return ISSUED if group.queued else DONE


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's short name, such as `float32`."""
    return str(dtype).removeprefix("torch.")


recorder = FlightRecorder()


# -- NCCL's record -------------------------------------------------------------------------


def _nccl_dump() -> Any:
    return getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace_json", None)


def has_nccl_trace() -> bool:
    """Return whether this build of torch keeps a record of NCCL's calls."""
    return _nccl_dump() is not None


def nccl_trace(limit_s: float) -> dict[str, Any] | None:
    """Return torch's record of calls unfinished on a device; None without a record or after
    `limit_s`.

    A separate thread asks, because a stuck driver must not block the caller.
    """
    dump, traces = _nccl_dump(), list[dict[str, Any]]()
    if dump is None:
        return None

    def ask() -> None:
        if text := dump(includeCollectives=True, onlyActive=True):
            traces.append(json.loads(text))

    asking = threading.Thread(target=ask, name="flight recorder", daemon=True)
    asking.start()
    # in a thread with a limit, because NCCL's recorder may wait for a lock of the hung call
    asking.join(limit_s)
    return traces[0] if traces else None
