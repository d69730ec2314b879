"""State of each group that this rank calls on: who is in it, how its calls travel, and how
many there were.

`state_of(group)` is made at the first call on a group and dropped when the group ends. Transports
and messages ask it how to send; the flight recorder counts in it, and each of its calls holds it.
"""

from collections.abc import Callable
from datetime import timedelta
from weakref import ref

import torch.distributed as dist

from torchdistpackage.comm.backends import Transport, deprioritize, transport_of

Group = dist.ProcessGroup


class GroupState:
    """The members of a group, its transport, and the calls of this rank on it.

    Who may change what: the flight recorder counts `issued`, `done`, `sent`, `received` and
    `waited_s`; transport/pairwise.py `expected`; creation.py sets `limit`; tpc names the `axis`
    (`name_axis`).

    ranks: global ranks of the members, in group order.
    index: place of this rank among them.
    others: places of the others, from the next one on, so that no rank is everybody's first.
    axis: the axis of the topology along which they lie, "" for a group without a name.
    group: the group itself, or None once it is gone.
    queued: as in `Transport`; a call returns before it is done.
    direct: as in `Transport`; parts go by messages (transport/pairwise.py).
    limit: how long one such message may take; None: as long as the back end says.
    left: messages whose `Work` was dropped without a wait (`settle`).
    issued, done: collectives that began, and those that the host no longer waits for.
    expected: collectives whose receives were posted ahead (transport/sharded_flat.py).
    sent, received: number of messages to and from each global rank.
    waited_s: for how long the host has been blocked in its calls, in all.
    """

    __slots__ = (
        "axis", "direct", "done", "expected", "group", "index", "issued", "left", "limit",
        "others", "queued", "ranks", "received", "sent", "waited_s",
    )  # fmt: skip

    def __init__(self, ranks: tuple[int, ...], index: int, transport: Transport):
        self.ranks, self.index, self.axis = ranks, index, ""
        self.others = tuple([(index + step) % len(ranks) for step in range(1, len(ranks))])
        self.group: Callable[[], Group | None] = lambda: None
        self.queued, self.direct = transport.queued, transport.direct
        self.limit: timedelta | None = None
        self.left: list[dist.Work] = []
        self.issued = self.done = self.expected = 0
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.waited_s = 0.0

    def settle(self) -> None:
        """Wait for what was left: a message that is given up takes its connection along."""
        while self.left:
            work = self.left.pop()
            work.wait() if self.limit is None else work.wait(self.limit)


# By id and not by group: a group that its users let go must end, threads and all.
_states: dict[int, GroupState] = {}


def state_of(group: Group) -> GroupState:
    """The state of the group, made at its first call."""
    return _states.get(id(group)) or _add(group)


def known_states() -> list[GroupState]:
    """The states of all groups that this rank has called on and that live. For any thread."""
    return list(_states.values())


def name_axis(group: Group, axis: str) -> None:
    """Say along which axis a group lies; the first name of a group that several share stays."""
    state = state_of(group)
    state.axis = state.axis or axis


def drop_states(*groups: Group) -> None:
    """Drop what is known of groups that have ended; calls in the record keep theirs."""
    for group in groups:
        _states.pop(id(group), None)


def drop_all_states() -> None:
    """Drop what is known of all groups: the world has ended."""
    _states.clear()


def _add(group: Group) -> GroupState:
    known, key = dist.distributed_c10d._world.pg_map, id(group)
    # A group that torch has ended may live on in somebody's hands; what is known of it is stale.
    alive = [g for state in known_states() if (g := state.group()) is not None]
    drop_states(*[g for g in alive if g not in known])
    ranks = tuple(dist.get_process_group_ranks(group))
    state = _states[key] = GroupState(ranks, group.rank(), transport_of(group))
    state.group = ref(group, lambda _: _states.pop(key, None))
    if state.direct:
        deprioritize()  # here, as every group comes by before its first call, whatever made it
    return state
