"""State of each group that this rank uses: its members, its transport, and counts of its calls.

`state_of(group)` creates the state at the first call on a group; it is dropped when the group ends.
Transports and messages read it to decide how to send. The flight recorder keeps its counts in it,
and each recorded call refers to it.
"""

from collections.abc import Callable
from datetime import timedelta
from weakref import ref

import torch.distributed as dist

from torchdistpackage.comm.backends import Transport, deprioritize, transport_of

Group = dist.ProcessGroup


class GroupState:
    """The members of a group, its transport, and the calls of this rank on it.

    Only these change it: the flight recorder counts `issued`, `done`, `sent`, `received` and
    `waited_s`; transport/pairwise.py counts `expected`; creation.py sets `limit`; tpc names the
    `axis` (`name_axis`).

    ranks: global ranks of the members, in group order.
    index: index of this rank among them.
    others: indices of the other members, starting after this one, so that not all send to the same
        rank first.
    axis: the topology's axis along which they lie; "" for an unnamed group.
    group: returns the group, or None once it is gone.
    queued: as in `Transport`; a call returns before it is done.
    direct: as in `Transport`; collectives are made of messages (transport/pairwise.py).
    limit: time limit of such a message; None: the back end's own.
    left: messages whose `Work` was dropped without a wait (`settle`).
    issued, done: numbers of collectives that began, and that the host no longer waits for.
    expected: number of collectives whose receives were posted ahead (transport/sharded_flat.py).
    sent, received: numbers of messages to and from each global rank.
    waited_s: seconds that the host has been blocked in its calls.
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
        """Wait for abandoned messages, because dropping a message breaks its connection."""
        while self.left:
            work = self.left.pop()
            work.wait() if self.limit is None else work.wait(self.limit)


# Keyed by id: a reference to the group would keep it and its threads alive.
_states: dict[int, GroupState] = {}


def state_of(group: Group) -> GroupState:
    """Return the state of the group, which its first call creates."""
    return _states.get(id(group)) or _add(group)


def known_states() -> list[GroupState]:
    """Return the states of all living groups that this rank has used; safe in any thread."""
    return list(_states.values())


def keep_state(of: object, state: GroupState) -> Callable[[], None]:
    """Make `state_of(of)` return `state`, for ranks that talk without a group; return a function
    that undoes this.
    """
    key = id(of)
    _states[key] = state

    def drop() -> None:
        if _states.get(key) is state:
            del _states[key]

    return drop


def name_axis(group: Group, axis: str) -> None:
    """Name the axis of a group; a group with several names keeps the first."""
    state = state_of(group)
    state.axis = state.axis or axis


def drop_states(*groups: Group) -> None:
    """Drop the state of groups that have ended; recorded calls keep theirs."""
    for group in groups:
        _states.pop(id(group), None)


def drop_all_states() -> None:
    """Drop the state of all groups after the world has ended."""
    _states.clear()


def _add(group: Group) -> GroupState:
    """Create the state of a group, and drop the states of groups that torch has ended."""
    living_groups, key = dist.distributed_c10d._world.pg_map, id(group)
    # a group that torch has ended may still be referenced; its state is stale
    alive = [g for state in known_states() if (g := state.group()) is not None]
    drop_states(*[g for g in alive if g not in living_groups])
    ranks = tuple(dist.get_process_group_ranks(group))
    state = _states[key] = GroupState(ranks, group.rank(), transport_of(group))
    state.group = ref(group, lambda _: _states.pop(key, None))
    if state.direct:
        deprioritize()  # here, because every group passes here before its first call
    return state
