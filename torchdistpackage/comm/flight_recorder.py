"""The last calls of this rank, in a ring: what a hang report reads.

One rule: an entry is a list put into a deque, and nothing else happens on the way to the network;
numbers and texts are made when somebody asks. A call is `WAITING` while the host is blocked in
it. On a device queue the host is not blocked: there a call that returned counts as issued.
"""

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypedDict
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm.backends import Transport, transport_of
from torchdistpackage.comm.gloo_threads import deprioritize

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
    as long as the back end says. left: messages for which nobody waits any more. expected: calls
    whose receives were posted ahead (comm/transport/sharded_flat.py).
    """

    __slots__ = (
        "axis", "direct", "done", "expected", "group", "issued", "left", "limit",
        "passed", "queued", "ranks", "received", "sent",
    )  # fmt: skip

    def __init__(self, ranks: tuple[int, ...], transport: Transport):
        self.ranks, self.axis = ranks, ""
        self.group: Callable[[], dist.ProcessGroup | None] = lambda: None
        self.queued, self.direct = transport.queued, transport.direct
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


class GroupFacts(TypedDict):
    """`done` is None where only the device knows."""

    ranks: list[int]
    axis: str
    issued: int
    done: int | None


class PeerFacts(TypedDict):
    """Messages issued so far to and from global rank `peer` in groups[group]."""

    group: int
    peer: int
    sent: int
    received: int


class CallFacts(TypedDict):
    """`sequence` counts collectives of the group, or messages of one direction with `peer`."""

    group: int
    operation: str
    sequence: int
    shape: list[int]
    dtype: str
    peer: int | None
    action: str | None
    state: str
    age_s: float


class RecorderSnapshot(TypedDict):
    """What this rank did last, oldest call first; nothing in it but JSON."""

    time_s: float
    step: int
    phase: str
    groups: list[GroupFacts]
    peers: list[PeerFacts]
    calls: list[CallFacts]


class FlightRecorder:
    """Use the instance of this module, `calls`.

    phase: what this rank does between calls ("data", "forward", ...); step: of the run.
    action: of the schedule, that is being run or whose messages are being posted.
    waited_s: for how long the host has been blocked in calls, in all; it only grows.
    clock_s: what that is measured with.
    checks: compare what the members of a group are about to do (comm/debug_checks.py).
    """

    def __init__(self) -> None:
        self.phase = ""
        self.step = 0
        self.action: object | None = None
        self.waited_s = 0.0
        self.clock_s: Callable[[], float] = _monotonic_s
        self.checks = False
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

    def wait(self, call: Call) -> float:
        """The host is about to block in `call`; what comes back is for `end`."""
        call[STATE] = WAITING
        return self.clock_s()

    def end(self, call: Call, since_s: float) -> None:
        """The host goes on after `call`, in which it was blocked since `since_s`."""
        line = call[LINE]
        call[STATE] = line.passed
        if call[PEER] is None:
            line.done += 1
        self.waited_s += self.clock_s() - since_s

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
            self._lines.pop(id(group), None)

    def forget_all(self) -> None:
        """The world has ended, and with it what was set for it: the clock of waits, the checks."""
        self._lines.clear()
        self.clock_s, self.checks = _monotonic_s, False

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
                _facts(call, index[id(call[LINE])], now_s)
                for call in list(self._ring)[-num:]
                if id(call[LINE]) in index
            ],
        }

    def _line(self, group: dist.ProcessGroup) -> GroupLog:
        known, lines, key = dist.distributed_c10d._world.pg_map, self._lines, id(group)
        alive = [g for line in list(lines.values()) if (g := line.group()) is not None]
        self.forget(*[g for g in alive if g not in known])
        ranks = tuple(dist.get_process_group_ranks(group))
        line = lines[key] = GroupLog(ranks, transport_of(group))
        line.group = ref(group, lambda _: lines.pop(key, None))
        if line.direct:
            deprioritize()  # here, as every group comes by before its first call, whoever made it
        return line


def _facts(call: Call, group: int, now_s: float) -> CallFacts:
    shape, dtype, action = call[SHAPE], call[DTYPE], call[ACTION]
    return {
        "group": group,
        "operation": call[OPERATION],
        "sequence": call[SEQUENCE],
        "shape": [] if shape is None else list(shape),
        "dtype": "" if dtype is None else dtype_name(dtype),
        "peer": call[PEER],
        "action": None if action is None else str(action),
        "state": call[STATE],
        "age_s": now_s - call[BEGAN_S],
    }


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`, not `torch.float32`."""
    return str(dtype).removeprefix("torch.")


recorder = FlightRecorder()
