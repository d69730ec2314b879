"""Process groups from rank lists: only those this rank is in, one for each different list.

Groups are scarce (threads, memory, and seconds to start and stop), so identical lists share
one, all axes of size 1 share one group of one, and a list of everybody is the default
group. Members alone take part in creating a group, so all members must ask for their groups
in one order; a fixed order of axes gives that.
"""

import hashlib
import threading
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torchdistpackage.comm.io_threads import yield_cores
from torchdistpackage.comm.primitives import Group, is_queued, ranks_of, set_timeout
from torchdistpackage.comm.record import calls
from torchdistpackage.errors import CommError
from torchdistpackage.topology.mesh import Mesh


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

    def of(self, ranks: Sequence[int], *, name: str | None = None, use: str = "") -> Group:
        """The group of these ranks, made on first use by all of them together.

        use: one of its own for this use, which others do not share. Calls on a group run in the
            order in which they were issued, so two uses whose order differs between ranks need two.

        Raises:
            CommError: this rank is not among them, or there is no default group yet.
        """
        key = tuple(sorted(ranks))
        if self._rank not in key:
            raise CommError(f"rank {self._rank} asked for the group of ranks {key}, without itself")
        if not dist.is_initialized():
            raise CommError("there is no default process group; call setup_distributed() first")
        if len(key) == dist.get_world_size() and not use:
            return dist.group.WORLD  # type: ignore[return-value]
        if (key, use) not in self._made:
            limit = None if self._timeout_s is None else timedelta(seconds=self._timeout_s)
            self._made[key, use] = _make(key, self._rank, use, timeout=limit, group_desc=name)
        return self._made[key, use]

    def prepare(self, lists: Iterable[Sequence[int]]) -> None:
        """Make the groups of several rank lists, each of which holds this rank.

        They are made in one order on all ranks, that of the lists themselves: whoever waits in
        a group waits for a smaller one first, so nobody waits in a circle.
        """
        for ranks in sorted({tuple(sorted(ranks)) for ranks in lists}):
            self.of(ranks)

    def set_timeout(self, seconds: float) -> None:
        """Time limit of every later operation, on the default group too."""
        self._timeout_s = seconds
        alive = dist.distributed_c10d._world.pg_map  # companions may be of a world that ended
        for group in (_world(), *self._made.values(), *_on_cpu.values(), *_twins.values()):
            if group in alive:
                set_timeout(group, seconds)

    @property
    def are_there(self) -> bool:
        """Whether the default group is still that on top of which these were made."""
        return _world() is self._world

    def destroy(self) -> None:
        """End all groups made here, unless their world has ended; the default group stays."""
        for group in self._made.values() if self.are_there else ():
            leave_twin(group)
            leave_cpu(group)
            _end(group)
        self._made.clear()


def _world() -> Group | None:
    return dist.group.WORLD if dist.is_initialized() else None


_on_cpu: WeakKeyDictionary[Group, Group] = WeakKeyDictionary()
"""Group of GPUs -> the gloo group of the same ranks."""
_twins: WeakKeyDictionary[Group, Group] = WeakKeyDictionary()
"""Gloo group -> another of the same ranks, over connections of its own."""


def on_cpu(group: Group) -> Group:
    """A group of the same ranks that moves what is in host memory: `group` itself unless NCCL.

    Made when all of its ranks ask for the first time, and ended with `group` or by `leave_cpu`.
    """
    if not is_queued(group):
        return group
    return _companion(group, _on_cpu, "cpu", None)


def make_twins(groups: Iterable[Group]) -> None:
    """For each gloo group of several ranks another one of the same ranks, over other connections.

    All members call it, for whichever groups they are in. A twin ends with its group.

    Raises:
        CommError: a member did not come within the time limit of its group.
    """
    by_ranks = {ranks_of(group): group for group in groups}
    for ranks in sorted(by_ranks):  # as in Groups.prepare
        group = by_ranks[ranks]
        if len(ranks) > 1 and calls.line(group).direct:
            limit = group._get_backend(torch.device("cpu")).options._timeout
            _companion(group, _twins, "twin", limit)
            yield_cores()  # it is in no record, where others come by


def twin_of(group: Group) -> Group | None:
    """What `make_twins` made for `group`."""
    return _twins.get(group)


def leave_cpu(group: Group) -> None:
    """End what `on_cpu` made for `group`, if it made one, and that one's twin."""
    if group in _on_cpu:
        leave_twin(_on_cpu[group])
    _leave(group, _on_cpu)


def leave_twin(group: Group) -> None:
    """End the twin of `group`, if it has one."""
    _leave(group, _twins)


def _companion(
    group: Group, among: MutableMapping[Group, Group], use: str, limit: timedelta | None
) -> Group:
    if group not in among:
        ranks = ranks_of(group)
        try:
            among[group] = _make(ranks, dist.get_rank(), use, timeout=limit, backend="gloo")
        except RuntimeError as error:
            raise CommError(f"ranks {ranks} could not make a second group: {error}") from error
    return among[group]


def _leave(group: Group, among: MutableMapping[Group, Group]) -> None:
    if (made := among.pop(group, None)) is not None:
        _end(made)


_complete: WeakKeyDictionary[Group, tuple[dist.Store, str]] = WeakKeyDictionary()
"""Group -> the key that its last member sets once it has the group, too, and in which store."""
_LATE_S = 2.0
"""How long a group waits for such a member before it ends; one that failed never comes."""


def _make(key: tuple[int, ...], rank: int, use: str, **options: Any) -> Group:
    with _named_by_members(key, rank, use) as (store, name):
        group = dist.new_group(list(key), use_local_synchronization=True, **options)
    assert isinstance(group, Group)
    complete = f"complete/{name}"
    if store.add(f"has/{name}", 1) == len(key):
        store.set(complete, "")
    _complete[group] = store, complete
    return group


def _end(group: Group) -> None:
    """End a group, but not while a member is still making it.

    A gloo member that is about to return from making the group finds it broken ("Connection closed
    by peer") where another one, which needed no message, has already ended it.
    """
    store, complete = _complete.pop(group)
    with suppress(RuntimeError):  # too late, or the store has gone: this is no reason to stay
        if not store.check([complete]):
            store.wait([complete], timedelta(seconds=_LATE_S))
    calls.forget(group)
    dist.destroy_process_group(group)


class _Naming(threading.local):
    """How this thread's next group is called; None: as torch likes."""

    name: str | None = None


_naming = _Naming()
_patch = threading.Lock()
_num_inside = 0
_torch_naming = dist.distributed_c10d._hash_ranks_to_str


def _name_of(ranks: list[int]) -> str:
    return _torch_naming(ranks) if _naming.name is None else _naming.name


@contextmanager
def _named_by_members(
    key: tuple[int, ...], rank: int, use: str
) -> Iterator[tuple[dist.Store, str]]:
    """Inside, torch names a new group by its ranks and by how often these made one before.

    The name is where members meet in the store, so all must arrive at the same one. torch's own
    choice mixes in how many groups the process has, which differs between ranks that are in
    different numbers of them, and repeats once a group was destroyed, whose addresses then
    are found again.
    """
    global _num_inside
    store = dist.distributed_c10d._get_default_store()
    members = hashlib.sha1(f"{key}{use}".encode(), usedforsecurity=False).hexdigest()
    name = f"{members}-{store.add(f'made/{members}/{rank}', 1)}"
    # never held while a group waits for its members: these may be threads of this process
    with _patch:
        _num_inside += 1
        dist.distributed_c10d._hash_ranks_to_str = _name_of
    before, _naming.name = _naming.name, name
    try:
        yield store, name
    finally:
        _naming.name = before
        with _patch:
            _num_inside -= 1
            if not _num_inside:
                dist.distributed_c10d._hash_ranks_to_str = _torch_naming
