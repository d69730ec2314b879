"""Process groups from rank lists: only those that contain this rank, one for each distinct list.

Groups are expensive (threads, memory, and seconds to start and stop). So identical lists share one
group, all axes of size 1 share one group of one, and a list of all ranks is the default group. Only
its members create a group, and they wait for each other. So all must ask for their groups in one
order: that of layout/derive.py.

A group may have companions of the same ranks, for host memory and for the reverse direction. All
members create one together when they first ask for it; it ends with its group.

A device back end connects the ranks of a group in their first collective, and two ranks in their
first message, and blocks the host meanwhile. In the middle of a pipeline that is too late: a first
batch of messages needs all ranks of the group, and some of them wait for others. So groups are
connected when they are created.

A message that an exception left in flight would be mistaken for one of the next step. So a rank
refuses further steps over that group on its own, without asking the others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TypeVar

import torch
import torch.distributed as dist

from torchdistpackage.comm.backends import deprioritize, device_of, is_queued, transport_of
from torchdistpackage.comm.creation import (
    Group,
    PerGroup,
    create,
    creation_limit,
    default_store,
    default_timeout_s,
    end,
    is_alive,
    ranks_of,
    set_timeout,
)
from torchdistpackage.comm.group_options import AXIS_OPTIONS, GroupOptions, merged
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.errors import CommError
from torchdistpackage.layout.derive import Creation
from torchdistpackage.topology.mesh import Mesh

Item = TypeVar("Item")


class Groups:
    """The groups that one rank has created, on top of the default group."""

    def __init__(
        self,
        rank: int,
        timeout_s: float | None = None,
        options: Mapping[str, GroupOptions] = AXIS_OPTIONS,
    ):
        """options: of groups along an axis, by the axis's name."""
        self._rank = rank
        self._timeout_s = timeout_s
        self._options = options
        self._world = _world()
        self._made: dict[tuple[tuple[int, ...], str], Group] = {}

    def along(self, mesh: Mesh, axes: Iterable[str]) -> Group:
        """Return this rank's group along `axes` of `mesh`."""
        axes = tuple(axes)
        return self.of(mesh.group(self._rank, axes), axes=axes if len(axes) == 1 else ())

    def of(
        self,
        ranks: Sequence[int],
        *,
        name: str | None = None,
        use: str = "",
        connects: bool = True,
        axes: Sequence[str] = (),
    ) -> Group:
        """Return the group of these ranks; its first use creates and connects it on all of them.

        use: name of a use with a group of its own. Calls on a group run in the order in which they
            were issued, so two uses whose order differs between ranks need two groups.
        connects: False leaves connecting to its first call, which must be a collective of all
            ranks.
        axes: axes that the group lies along, whose options it gets when it is created.

        Raises:
            CommError: this rank is not in the list, there is no default group, or other ranks did
                not come in time.
        """
        key = tuple(sorted(ranks))
        if self._rank not in key:
            raise CommError(
                f"rank {self._rank} asked for a group of ranks {key}, of which it is not one; "
                "call it on those ranks only"
            )
        if not dist.is_initialized():
            raise CommError("there is no default process group; call setup_distributed() first")
        if len(key) == dist.get_world_size() and not use:
            return dist.group.WORLD  # type: ignore[return-value]
        if (key, use) not in self._made:
            # a group of one rank communicates with nobody, so it needs no connection
            connects, limit_s = connects and len(key) > 1, self._timeout_s
            options = merged(self._options.get(axis, GroupOptions()) for axis in axes)
            group = create(key, use, limit_s=limit_s, name=name, connects=connects, options=options)
            self._made[key, use] = group
            if connects:
                connect(group, limit_s=limit_s)
        return self._made[key, use]

    def prepare(self, creations: Iterable[Creation]) -> None:
        """Create and connect groups that contain this rank, in this order (layout/derive.py).

        All ranks of each group call it.
        """
        for creation in creations:
            group = self.of(creation.ranks, connects=creation.connects, axes=creation.axes)
            if creation.connects:
                connect(group, neighbours=creation.neighbours, limit_s=self._timeout_s)
            if creation.neighbours:
                on_cpu(group)  # create now the companion that a pipeline's headers need

    def set_timeout(self, seconds: float) -> None:
        """Set the time limit of every later operation, on the default group too."""
        self._timeout_s = seconds
        for group in (_world(), *self._made.values(), *_on_cpu.values(), *_reverse_groups.values()):
            if is_alive(group):  # companions may belong to a world that has ended
                set_timeout(group, seconds)

    @property
    def are_there(self) -> bool:
        """True if the default group is still the one on which these groups were created."""
        return _world() is self._world

    def destroy(self) -> None:
        """End all groups of this object, unless their world has ended; keep the default group."""
        for group in self._made.values() if self.are_there else ():
            _leave(group, _reverse_groups)
            leave_cpu(group)
            end(group)
        self._made.clear()


def _world() -> Group | None:
    """Return the default group, or None."""
    return dist.group.WORLD if dist.is_initialized() else None


def for_each_group(
    items: Iterable[Item],
    group_of: Callable[[Item], Group] = attrgetter("group"),
    *,
    min_size: int = 1,
) -> list[tuple[Group, list[Item]]]:
    """Yield each group of at least `min_size` ranks with its items, in their order.

    Groups come in the order of their rank lists, which is the same on all ranks. So calling one
    collective for each group never deadlocks: a rank that waits in a group waits for a rank at an
    earlier group, and no group is earlier than the first (layout/derive.py).
    """
    by_ranks: dict[tuple[int, ...], tuple[Group, list[Item]]] = {}
    for item in items:
        group = group_of(item)
        if group.size() >= min_size:
            by_ranks.setdefault(ranks_of(group), (group, []))[1].append(item)
    return [by_ranks[ranks] for ranks in sorted(by_ranks)]


# -- companions ----------------------------------------------------------------------------

_on_cpu: PerGroup[Group] = PerGroup()
"""Group of GPUs -> its companion, a gloo group of the same ranks."""
_reverse_groups: PerGroup[Group] = PerGroup()
"""Gloo group -> its twin: another group of the same ranks with its own connections."""


def on_cpu(group: Group) -> Group:
    """Return a group of the same ranks for host memory: `group` itself, unless its calls are
    queued.

    The companion is created when all ranks first ask for it, and ends with `group` or by
    `leave_cpu`.
    """
    return _companion(group, _on_cpu, "cpu", None) if is_queued(group) else group


def make_duplex_groups(groups: Iterable[Group]) -> None:
    """Create a twin, with its own connections, for each gloo group of several ranks.

    All members call it, each for its groups. A twin ends with its group.

    Raises:
        CommError: a member did not come within the time limit of its group.
    """
    for group, _ in for_each_group(groups, lambda group: group, min_size=2):
        if state_of(group).direct:
            limit = group._get_backend(torch.device("cpu")).options._timeout
            _companion(group, _reverse_groups, "twin", limit.total_seconds())
            deprioritize()  # here, because a twin has no GroupState, whose creation does it


def reverse_group(group: Group) -> Group | None:
    """Return the twin that `make_duplex_groups` created for `group`, or None."""
    return _reverse_groups.get(group)


def leave_cpu(group: Group) -> None:
    """End the companion that `on_cpu` created for `group`, and the companion's twin, if they
    exist.
    """
    if group in _on_cpu:
        _leave(_on_cpu[group], _reverse_groups)
    _leave(group, _on_cpu)


def _companion(
    group: Group, among: MutableMapping[Group, Group], use: str, limit_s: float | None
) -> Group:
    """Return a companion of a group, creating it on first use."""
    if group not in among:
        ranks = ranks_of(group)
        try:
            backend = transport_of(group).host_backend
            among[group] = create(ranks, use, limit_s=limit_s, backend=backend)
        except RuntimeError as error:
            raise CommError(f"ranks {ranks} could not make a second group: {error}") from error
    return among[group]


def _leave(group: Group, among: MutableMapping[Group, Group]) -> None:
    """End a companion, if there is one."""
    if (companion := among.pop(group, None)) is not None:
        end(companion)


# -- connections ---------------------------------------------------------------------------

_connected: PerGroup[bool] = PerGroup()
"""Group -> whether neighbours are connected for messages too."""


def connect(group: Group, *, neighbours: bool = False, limit_s: float | None = None) -> None:
    """Connect all ranks of the group once; gloo and groups of one rank need nothing.

    All ranks call it before the first message on the group. It returns when all have come.

    neighbours: also connect adjacent ranks of the ring for messages. limit_s: limit for the other
    ranks to come.

    Raises:
        CommError: ranks did not come, or the back end connected ranks outside the group.
    """
    state = _connected.get(group)
    if group.size() == 1 or state or (state is False and not neighbours) or not is_queued(group):
        return
    ranks, store, key = ranks_of(group), default_store(), f"connect/{group.group_name}"
    store.set(f"{key}/{dist.get_rank()}", "")

    def came(store: dist.Store, rank: int) -> bool:
        return store.check([f"{key}/{rank}"])

    limit_s = limit_s or default_timeout_s(transport_of(group).name)
    name = f"{key}/{neighbours}"
    with creation_limit(f"connecting ranks {ranks}", ranks, came, store, limit_s, name=name):
        if state is None:
            _sum(group)
        if neighbours:
            _messages(group)
    _connected[group] = neighbours


def _sum(group: Group) -> None:
    """Run one all-reduce, which connects the ranks, and check the number of ranks in it."""
    number = torch.ones(1, device=device_of(group))
    dist.all_reduce(number, group=group)
    if int(number) != group.size():  # reading the number waits until all ranks are connected
        raise CommError(
            f"a test sum over the {group.size()} ranks {ranks_of(group)} is one over "
            f"{int(number)}: torch {torch.__version__} connected the wrong ranks; report this"
        )


_paired: PerGroup[set[frozenset[int]]] = PerGroup()
"""Group -> pairs of its indices, besides neighbours, that are connected for messages."""


def connect_pairs(group: Group, pairs: Iterable[tuple[int, int]]) -> None:
    """Connect more pairs of indices in the group for messages; all ranks pass the same pairs.

    Neighbours of the ring are left to `connect`, which comes first.
    """
    size, at, connected = group.size(), group.rank(), _paired.setdefault(group, set())
    new = {frozenset(p) for p in pairs if (p[0] - p[1]) % size not in (0, 1, size - 1)} - connected
    if not new or not is_queued(group):
        return
    ranks = ranks_of(group)
    if peers := sorted(ranks[position] for pair in new if at in pair for position in pair - {at}):
        _messages(group, peers)
    connected |= new


def _messages(group: Group, peers: Sequence[int] = ()) -> None:
    """Exchange messages with these ranks, which connects them; by default both neighbours of the
    ring.
    """
    ranks, at = ranks_of(group), group.rank()
    peers = [*peers] or sorted({ranks[at - 1], ranks[(at + 1) % len(ranks)]})
    own_rank = torch.full((1,), float(ranks[at]), device=device_of(group))
    buffers = [torch.zeros_like(own_rank) for _ in peers]
    batch = [dist.P2POp(dist.isend, own_rank, peer, group) for peer in peers]
    batch += [
        dist.P2POp(dist.irecv, x, peer, group) for x, peer in zip(buffers, peers, strict=True)
    ]
    # one batch, because on NCCL a send and a receive one after the other would deadlock
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    senders = [int(x) for x in buffers]
    if senders != peers:
        raise CommError(
            f"messages of ranks {peers} to rank {ranks[at]} came from ranks {senders}, so torch "
            f"{torch.__version__} connected the wrong ranks; report this"
        )


# -- steps that an exception has ended -----------------------------------------------------

_interrupted: PerGroup[str] = PerGroup()
"""Group -> the exception that ended a step over it, while messages may have been in flight.

Such messages would meet the receives of the next step, so nothing is sent over the group again.
Only `step_over` writes it, around every run of an executor and every result of a step.
"""


@contextmanager
def step_over(group: Group) -> Iterator[None]:
    """Surround a step that the ranks of `group` have agreed on, and mark the group if it fails.

    A group of one rank has no messages, so it may continue after a failure.
    """
    try:
        yield
    except BaseException as error:
        if group.size() > 1:
            _interrupted.setdefault(group, f"{type(error).__name__}: {error}")
        raise


def refuse_interrupted(group: Group) -> None:
    """Raise CommError if an exception ended a step over `group` on this rank."""
    if group in _interrupted:
        raise CommError(
            f"an earlier step over this group was interrupted by {_interrupted[group]}; its "
            f"messages are lost: make a new group and a new executor or Pipeline over it"
        )


def is_interrupted(group: Group) -> bool:
    """Return whether an exception ended a step over `group` on this rank."""
    return group in _interrupted
