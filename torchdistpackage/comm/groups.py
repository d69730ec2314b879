"""Process groups from rank lists: only those this rank is in, one for each different list.

Groups are scarce (threads, memory, and seconds to start and stop), so identical lists share
one, all axes of size 1 share one group of one, and a list of all ranks is the default
group. Members alone take part in making a group, and wait for each other, so all must ask for
their groups in one order: that of layout/derive.py.

A group may have companions of the same ranks, for what is in host memory and for the way back. All
members make one together when they ask for it first; it ends with its group.

A back end on devices connects the ranks of a group in their first collective, and two ranks in
their first message, and the host is blocked meanwhile. In the middle of a pipeline that is too
late: a first batch of messages needs all ranks of the group, of which some wait for others. So
groups are connected when they are made.

What an exception left under way in a group would be taken for a message of the next step, so a rank
refuses further steps over that group by itself, without asking the others.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
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
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.errors import CommError
from torchdistpackage.layout.derive import Creation
from torchdistpackage.topology.mesh import Mesh

Item = TypeVar("Item")


class Groups:
    """The groups that one rank has made so far, on top of the default group."""

    def __init__(self, rank: int, timeout_s: float | None = None):
        self._rank = rank
        self._timeout_s = timeout_s
        self._world = _world()
        self._made: dict[tuple[tuple[int, ...], str], Group] = {}

    def along(self, mesh: Mesh, axes: Iterable[str]) -> Group:
        """My group along `axes` of `mesh`."""
        return self.of(mesh.group(self._rank, axes))

    def of(
        self, ranks: Sequence[int], *, name: str | None = None, use: str = "", connects: bool = True
    ) -> Group:
        """The group of these ranks, made and connected on first use by all of them together.

        use: one of its own for this use, which others do not share. Calls on a group run in the
            order in which they were issued, so two uses whose order differs between ranks need two.
        connects: False leaves that to its first call, which must be a collective of all its ranks.

        Raises:
            CommError: this rank is not among them, there is no default group yet, or others did
                not come.
        """
        key = tuple(sorted(ranks))
        if self._rank not in key:
            raise CommError(f"rank {self._rank} asked for the group of ranks {key}, without itself")
        if not dist.is_initialized():
            raise CommError("there is no default process group; call setup_distributed() first")
        if len(key) == dist.get_world_size() and not use:
            return dist.group.WORLD  # type: ignore[return-value]
        if (key, use) not in self._made:
            # what one rank sums or gathers is its own: that needs no communicator
            connects, limit_s = connects and len(key) > 1, self._timeout_s
            group = create(key, use, limit_s=limit_s, name=name, connects=connects)
            self._made[key, use] = group
            if connects:
                connect(group, limit_s=limit_s)
        return self._made[key, use]

    def prepare(self, wanted: Iterable[Creation]) -> None:
        """Make groups that hold this rank, in this order (layout/derive.py), and connect them.

        All ranks of each of them call it.
        """
        for one in wanted:
            group = self.of(one.ranks, connects=one.connects)
            if one.connects:
                connect(group, neighbours=one.neighbours, limit_s=self._timeout_s)
            if one.neighbours:
                on_cpu(group)  # headers and agreements of a pipeline

    def set_timeout(self, seconds: float) -> None:
        """Time limit of every later operation, on the default group too."""
        self._timeout_s = seconds
        for group in (_world(), *self._made.values(), *_on_cpu.values(), *_reverse_groups.values()):
            if is_alive(group):  # companions may be of a world that ended
                set_timeout(group, seconds)

    @property
    def are_there(self) -> bool:
        """Whether the default group is still that on top of which these were made."""
        return _world() is self._world

    def destroy(self) -> None:
        """End all groups made here, unless their world has ended; the default group stays."""
        for group in self._made.values() if self.are_there else ():
            _leave(group, _reverse_groups)
            leave_cpu(group)
            end(group)
        self._made.clear()


def _world() -> Group | None:
    return dist.group.WORLD if dist.is_initialized() else None


def for_each_group(
    items: Iterable[Item],
    group_of: Callable[[Item], Group] = attrgetter("group"),
    *,
    min_size: int = 1,
) -> list[tuple[Group, list[Item]]]:
    """Each group of at least `min_size` ranks with its items, in their order.

    Groups come in the order of their rank lists, which is the same on all ranks. A rank that calls
    one collective a group never deadlocks: a rank that waits in a group waits for one that is still
    at an earlier group, and none is earlier than the first (layout/derive.py).
    """
    found: dict[tuple[int, ...], tuple[Group, list[Item]]] = {}
    for item in items:
        group = group_of(item)
        if group.size() >= min_size:
            found.setdefault(ranks_of(group), (group, []))[1].append(item)
    return [found[ranks] for ranks in sorted(found)]


# -- companions ----------------------------------------------------------------------------

_on_cpu: PerGroup[Group] = PerGroup()
"""Group of GPUs -> the gloo group of the same ranks."""
_reverse_groups: PerGroup[Group] = PerGroup()
"""Gloo group -> another of the same ranks, over connections of its own."""


def on_cpu(group: Group) -> Group:
    """A group of the same ranks that moves what is in host memory: `group` itself unless NCCL.

    Made when all of its ranks ask for the first time, and ended with `group` or by `leave_cpu`.
    """
    return _companion(group, _on_cpu, "cpu", None) if is_queued(group) else group


def make_duplex_groups(groups: Iterable[Group]) -> None:
    """For each gloo group of several ranks another one of the same ranks, over other connections.

    All members call it, for whichever groups they are in. A twin ends with its group.

    Raises:
        CommError: a member did not come within the time limit of its group.
    """
    for group, _ in for_each_group(groups, lambda group: group, min_size=2):
        if state_of(group).direct:
            limit = group._get_backend(torch.device("cpu")).options._timeout
            _companion(group, _reverse_groups, "twin", limit.total_seconds())
            deprioritize()  # it is in no record, where others come by


def reverse_group(group: Group) -> Group | None:
    """The twin that `make_duplex_groups` made for `group`, or None."""
    return _reverse_groups.get(group)


def leave_cpu(group: Group) -> None:
    """End what `on_cpu` made for `group`, if it made one, and that one's twin."""
    if group in _on_cpu:
        _leave(_on_cpu[group], _reverse_groups)
    _leave(group, _on_cpu)


def _companion(
    group: Group, among: MutableMapping[Group, Group], use: str, limit_s: float | None
) -> Group:
    if group not in among:
        ranks = ranks_of(group)
        try:
            backend = transport_of(group).host_backend
            among[group] = create(ranks, use, limit_s=limit_s, backend=backend)
        except RuntimeError as error:
            raise CommError(f"ranks {ranks} could not make a second group: {error}") from error
    return among[group]


def _leave(group: Group, among: MutableMapping[Group, Group]) -> None:
    if (made := among.pop(group, None)) is not None:
        end(made)


# -- connections ---------------------------------------------------------------------------

_connected: PerGroup[bool] = PerGroup()
"""Group -> whether neighbours are connected for messages, too."""


def connect(group: Group, *, neighbours: bool = False, limit_s: float | None = None) -> None:
    """Connect all ranks of the group, once; nothing on gloo, or of one rank.

    All of them call it, before any sends another one a message on the group. It returns when all
    have come.

    neighbours: also those in the ring of its ranks, for messages. limit_s: for the others to come.

    Raises:
        CommError: they did not come, or the back end joined other ranks than those of the group.
    """
    known = _connected.get(group)
    if group.size() == 1 or known or (known is False and not neighbours) or not is_queued(group):
        return
    ranks, store, key = ranks_of(group), default_store(), f"connect/{group.group_name}"
    store.set(f"{key}/{dist.get_rank()}", "")

    def came(store: dist.Store, rank: int) -> bool:
        return store.check([f"{key}/{rank}"])

    limit_s = limit_s or default_timeout_s(transport_of(group).name)
    name = f"{key}/{neighbours}"
    with creation_limit(f"connecting ranks {ranks}", ranks, came, store, limit_s, name=name):
        if known is None:
            _sum(group)
        if neighbours:
            _messages(group)
    _connected[group] = neighbours


def _sum(group: Group) -> None:
    number = torch.ones(1, device=device_of(group))
    dist.all_reduce(number, group=group)
    if int(number) != group.size():  # reading it waits for all
        raise CommError(
            f"a sum over the {group.size()} ranks {ranks_of(group)} is one over {int(number)}: "
            f"torch {torch.__version__} connected other ranks; report this"
        )


def _messages(group: Group) -> None:
    ranks, at = ranks_of(group), group.rank()
    peers = sorted({ranks[at - 1], ranks[(at + 1) % len(ranks)]})
    mine = torch.full((1,), float(ranks[at]), device=device_of(group))
    buffers = [torch.zeros_like(mine) for _ in peers]
    batch = [dist.P2POp(dist.isend, mine, peer, group) for peer in peers]
    batch += [
        dist.P2POp(dist.irecv, x, peer, group) for x, peer in zip(buffers, peers, strict=True)
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    came = [int(x) for x in buffers]
    if came != peers:
        raise CommError(f"messages of ranks {peers} to rank {ranks[at]} came from ranks {came}")


# -- steps that an exception has ended -----------------------------------------------------

_interrupted: PerGroup[str] = PerGroup()
"""Group -> the exception that ended a step over it while messages may have been under way.

What was on its way then would meet the receives of the next step, so nothing goes over the group
again. `step_over` alone writes here, around every run of an executor and every result of a step."""


@contextmanager
def step_over(group: Group) -> Iterator[None]:
    """Around a step that the ranks of `group` have agreed on; a group of one may fail and go on."""
    try:
        yield
    except BaseException as error:
        if group.size() > 1:
            _interrupted.setdefault(group, f"{type(error).__name__}: {error}")
        raise


def refuse_interrupted(group: Group) -> None:
    """Raises CommError if a step over `group` ended here in an exception."""
    if group in _interrupted:
        raise CommError(
            f"an earlier step over this group was interrupted by {_interrupted[group]}; its "
            f"messages are lost: make a new group and a new executor or Pipeline over it"
        )


def is_interrupted(group: Group) -> bool:
    """Whether a step over `group` ended here in an exception."""
    return group in _interrupted
