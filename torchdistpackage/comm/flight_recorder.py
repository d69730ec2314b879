"""The last calls of this rank, in a ring, and NCCL's own record: what a hang report reads.

An entry is a list put into a deque, and nothing else happens on the way to the network;
numbers and texts are made by `snapshot`. A call is `WAITING` while the host is blocked in it. On a
device queue the host is not blocked: there a call that returned counts as issued.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.group_state import GroupState, drop_all_states, known_states, state_of

SIZE = 512
"""Calls that are kept."""

ISSUED, WAITING, DONE, FAILED = "issued", "waiting", "done", "failed"

Call = list[Any]
"""A call by the places below; made by `FlightRecorder`, read by `FlightRecorder.snapshot`."""
GROUP, OPERATION, SEQUENCE, SHAPE, DTYPE, PEER, ACTION, BEGAN_S, STATE = range(9)

_monotonic_s = time.monotonic


class RecorderSnapshot(TypedDict):
    """The last calls of this rank, oldest first; nothing in it but JSON.

    groups: `ranks`, `axis`, and how many collectives were `issued` and `done` (None where only the
    device knows). peers: messages `sent` to and `received` from global rank `peer` in
    groups[`group`]. calls: see `FlightRecorder.begin`; `sequence` counts collectives of the group,
    or messages of one direction with `peer`.
    """

    time_s: float
    step: int
    phase: str
    groups: list[dict[str, Any]]
    peers: list[dict[str, Any]]
    calls: list[dict[str, Any]]


class FlightRecorder:
    """Use the instance of this module, `recorder`.

    phase: what this rank does between calls ("data", "forward", ...); step: of the run.
    action: of the schedule, that is being run or whose messages are being posted.
    waited_s: for how long the host has been blocked in calls, in all; it only grows.
    clock_s: what that is measured with.
    checks: compare what the members of a group are about to do (comm/debug_checks.py).
    ended: a list to note calls in when the host no longer waits for them, with the time and for how
        long it did; or None.
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
        """Note a collective that is about to be issued."""
        state = state_of(group)
        state.issued = sequence = state.issued + 1
        shape, dtype = (None, None) if x is None else (x.shape, x.dtype)
        call = [state, operation, sequence, shape, dtype, None, self.action, _monotonic_s(), ISSUED]
        self._ring.append(call)
        return call

    def begin_message(
        self, operation: str, state: GroupState, x: Tensor, peer: int, action: object
    ) -> Call:
        """Note that `x` is about to be sent to, or received from, global rank `peer`."""
        counts = state.sent if operation == "send" else state.received
        counts[peer] = sequence = counts.get(peer, 0) + 1
        now = _monotonic_s()
        call = [state, operation, sequence, x.shape, x.dtype, peer, action, now, ISSUED]
        self._ring.append(call)
        return call

    def end(self, call: Call, since_s: float) -> None:
        """The host goes on after `call`, in which it was blocked since `since_s`."""
        group = call[GROUP]
        call[STATE] = ISSUED if group.queued else DONE  # `returned`
        if call[PEER] is None:
            group.done += 1
        waited_s = self.clock_s() - since_s
        self.waited_s += waited_s
        group.waited_s += waited_s
        if self.ended is not None:
            self.ended.append((call, _monotonic_s(), waited_s))

    def forget_all(self) -> None:
        """The world has ended, and with it what was set for it: the clock of waits, the checks."""
        drop_all_states()
        self.clock_s, self.checks, self.ended = _monotonic_s, False, None

    def snapshot(self, num: int = 64) -> RecorderSnapshot:
        """The last `num` calls, and where this rank is in each group. From any thread."""
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
    """The state of a call on the group once the host goes on: on a queue it may still run."""
    return ISSUED if group.queued else DONE


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, not `torch.float32`."""
    return str(dtype).removeprefix("torch.")


recorder = FlightRecorder()


# -- NCCL's record -------------------------------------------------------------------------


def _nccl_dump() -> Any:
    return getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_nccl_trace_json", None)


def has_nccl_trace() -> bool:
    """Whether this build of torch keeps one: those with NCCL do."""
    return _nccl_dump() is not None


def nccl_trace(limit_s: float) -> dict[str, Any] | None:
    """Calls that a device has not ended, as torch has them; None without a record, or too late.

    Asked in a thread of its own: a driver that is stuck must not take the caller along.
    """
    dump, found = _nccl_dump(), list[dict[str, Any]]()
    if dump is None:
        return None

    def ask() -> None:
        if text := dump(includeCollectives=True, onlyActive=True):
            found.append(json.loads(text))

    asking = threading.Thread(target=ask, name="flight recorder", daemon=True)
    asking.start()
    asking.join(limit_s)
    return found[0] if found else None
