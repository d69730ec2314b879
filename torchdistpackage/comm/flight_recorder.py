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
from datetime import timedelta
from typing import Any, TypedDict
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.backends import Transport, deprioritize, transport_of

SIZE = 512
"""Calls that are kept."""

ISSUED, WAITING, DONE, FAILED = "issued", "waiting", "done", "failed"

Call = list[Any]
"""What it is, by the places below; made by `FlightRecorder`, read by `FlightRecorder.snapshot`."""
LINE, OPERATION, SEQUENCE, SHAPE, DTYPE, PEER, ACTION, BEGAN_S, STATE = range(9)

_monotonic_s = time.monotonic


class GroupLog:
    """The calls of this rank on one group: members, the axis they lie along, and how many.

    queued: calls return before they are done; passed: the state of one that has returned.
    direct: parts go by messages (comm/transport/pairwise.py), each of which may take `limit`; None:
    as long as the back end says. left: messages that are waited for no more. expected: calls whose
    receives were posted ahead (comm/transport/sharded_flat.py). index: of this rank in the group;
    others: of the others, from the next one on, so that no rank is everybody's first.
    swapped_bytes: as in `Transport`, -1 for other than two ranks; swap: what they do so by
    (comm/transport/swap.py), once it is there, one thread at a time by `lock`.
    """

    __slots__ = (
        "axis", "direct", "done", "expected", "group", "index", "issued", "left", "limit",
        "lock", "others", "passed", "queued", "ranks", "received", "sent", "swap", "swapped_bytes",
    )  # fmt: skip

    def __init__(self, ranks: tuple[int, ...], index: int, transport: Transport):
        self.ranks, self.index, self.axis = ranks, index, ""
        self.others = tuple([(index + step) % len(ranks) for step in range(1, len(ranks))])
        self.group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self.queued, self.direct = transport.queued, transport.direct
        self.swap: Any = None
        self.lock = threading.Lock()
        self.swapped_bytes = transport.swapped_bytes if len(ranks) == 2 else -1
        self.passed = ISSUED if self.queued else DONE
        self.limit: timedelta | None = None
        self.left: list[dist.Work] = []
        self.issued = self.done = self.expected = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}

    def settle(self) -> None:
        """Wait for what was left: a message that is given up takes its connection along."""
        while self.left:
            work = self.left.pop()
            work.wait() if self.limit is None else work.wait(self.limit)

    def close(self) -> None:
        """The group has ended; calls in the record keep this."""
        if self.swap is not None:
            self.swap.close()


class RecorderSnapshot(TypedDict):
    """What this rank did last, oldest call first; nothing in it but JSON.

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
        # By id and not by group: a group that its users let go must end, threads and all.
        self._lines: dict[int, GroupLog] = {}
        self._ring: deque[Call] = deque(maxlen=SIZE)

    def begin(self, operation: str, group: dist.ProcessGroup, x: Tensor | None) -> Call:
        """Note a collective that is about to be issued."""
        line = self._lines.get(id(group)) or self._line(group)
        line.issued = sequence = line.issued + 1
        shape, dtype = (None, None) if x is None else (x.shape, x.dtype)
        call = [line, operation, sequence, shape, dtype, None, self.action, _monotonic_s(), ISSUED]
        self._ring.append(call)
        return call

    def begin_message(
        self, operation: str, line: GroupLog, x: Tensor, peer: int, action: object
    ) -> Call:
        """Note that `x` is about to be sent to, or received from, global rank `peer`."""
        counts = line.sent if operation == "send" else line.received
        counts[peer] = sequence = counts.get(peer, 0) + 1
        now = _monotonic_s()
        call = [line, operation, sequence, x.shape, x.dtype, peer, action, now, ISSUED]
        self._ring.append(call)
        return call

    def end(self, call: Call, since_s: float) -> None:
        """The host goes on after `call`, in which it was blocked since `since_s`."""
        line = call[LINE]
        call[STATE] = line.passed
        if call[PEER] is None:
            line.done += 1
        waited_s = self.clock_s() - since_s
        self.waited_s += waited_s
        if self.ended is not None:
            self.ended.append((call, _monotonic_s(), waited_s))

    def line(self, group: dist.ProcessGroup) -> GroupLog:
        """What is known of the group."""
        return self._lines.get(id(group)) or self._line(group)

    def name(self, group: dist.ProcessGroup, axis: str) -> None:
        """Say along which axis a group lies; the first name of a group that several share stays."""
        line = self.line(group)
        line.axis = line.axis or axis

    def limit(self, group: dist.ProcessGroup, limit: timedelta) -> None:
        """How long a message of the group may take from now on."""
        self.line(group).limit = limit

    def forget(self, *groups: dist.ProcessGroup) -> None:
        """Groups that have ended."""
        for group in groups:
            self._drop(id(group))

    def forget_all(self) -> None:
        """The world has ended, and with it what was set for it: the clock of waits, the checks."""
        for key in list(self._lines):
            self._drop(key)
        self.clock_s, self.checks, self.ended = _monotonic_s, False, None

    def snapshot(self, num: int = 64) -> RecorderSnapshot:
        """The last `num` calls, and where this rank is in each group. From any thread."""
        lines, now_s = list(self._lines.values()), _monotonic_s()
        index = {id(line): i for i, line in enumerate(lines)}
        return {
            "time_s": time.time(),
            "step": self.step,
            "phase": self.phase,
            "groups": [
                {
                    "ranks": list(line.ranks),
                    "axis": line.axis,
                    "issued": line.issued,
                    "done": None if line.queued else line.done,
                }
                for line in lines
            ],
            "peers": [
                {
                    "group": i,
                    "peer": peer,
                    "sent": line.sent.get(peer, 0),
                    "received": line.received.get(peer, 0),
                }
                for i, line in enumerate(lines)
                for peer in sorted({*line.sent, *line.received})
            ],
            "calls": [
                {
                    "group": index[id(line)],
                    "operation": operation,
                    "sequence": sequence,
                    "shape": [] if shape is None else list(shape),
                    "dtype": "" if dtype is None else dtype_name(dtype),
                    "peer": peer,
                    "action": None if action is None else str(action),
                    "state": state,
                    "age_s": now_s - began_s,
                }
                for line, operation, sequence, shape, dtype, peer, action, began_s, state in list(
                    self._ring
                )[-num:]
                if id(line) in index
            ],
        }

    def _drop(self, key: int) -> None:
        if (line := self._lines.pop(key, None)) is not None:
            line.close()

    def _line(self, group: dist.ProcessGroup) -> GroupLog:
        known, lines, key = dist.distributed_c10d._world.pg_map, self._lines, id(group)
        alive = [g for line in list(lines.values()) if (g := line.group()) is not None]
        self.forget(*[g for g in alive if g not in known])
        ranks = tuple(dist.get_process_group_ranks(group))
        line = lines[key] = GroupLog(ranks, group.rank(), transport_of(group))
        line.group = ref(group, lambda _: self._drop(key))
        if line.direct:
            deprioritize()  # here, as every group comes by before its first call, whatever made it
        return line


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
