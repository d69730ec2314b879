"""Process groups from rank lists: only those this rank is in, one for each different list.

Groups are scarce (threads, memory, and seconds to start and stop), so identical lists share
one, all axes of size 1 share one group of one, and a list of everybody is the default
group. Members alone take part in creating a group, so all members must ask for their groups
in one order; a fixed order of axes gives that.
"""

import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from torchdistpackage.comm.primitives import Group, set_timeout
from torchdistpackage.errors import CommError
from torchdistpackage.topology.mesh import Mesh


class Groups:
    """The groups that one rank has made so far, on top of the default group."""

    def __init__(self, rank: int, timeout_s: float | None = None):
        self._rank = rank
        self._timeout_s = timeout_s
        self._made: dict[tuple[int, ...], Group] = {}

    def along(self, mesh: Mesh, axes: Iterable[str]) -> Group:
        """My group along `axes` of `mesh`."""
        return self.of(mesh.group(self._rank, axes))

    def of(self, ranks: Sequence[int], *, name: str | None = None) -> Group:
        """The group of these ranks, made on first use by all of them together.

        Raises:
            CommError: this rank is not among them, or there is no default group yet.
        """
        key = tuple(sorted(ranks))
        if self._rank not in key:
            raise CommError(f"rank {self._rank} asked for the group of ranks {key}, without itself")
        if not dist.is_initialized():
            raise CommError("there is no default process group; call setup_distributed() first")
        if len(key) == dist.get_world_size():
            return dist.group.WORLD  # type: ignore[return-value]
        if key not in self._made:
            timeout = None if self._timeout_s is None else timedelta(seconds=self._timeout_s)
            with _named_by_members(key, self._rank):
                group = dist.new_group(
                    list(key), timeout=timeout, use_local_synchronization=True, group_desc=name
                )
            assert isinstance(group, Group)
            self._made[key] = group
        return self._made[key]

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
        for group in (dist.group.WORLD, *self._made.values()):
            if group is not None:
                set_timeout(group, seconds)

    def destroy(self) -> None:
        """End all groups made here; the default group stays."""
        for group in self._made.values():
            dist.destroy_process_group(group)
        self._made.clear()


_naming = threading.Lock()


@contextmanager
def _named_by_members(key: tuple[int, ...], rank: int) -> Iterator[None]:
    """Inside, torch names a new group by its ranks and by how often these made one before.

    The name is where members meet in the store, so all must arrive at the same one. torch's own
    choice mixes in how many groups the process has, which differs between ranks that are in
    different numbers of them, and repeats once a group was destroyed, whose addresses then
    are found again.
    """
    store = dist.distributed_c10d._get_default_store()
    members = hashlib.sha1(str(key).encode(), usedforsecurity=False).hexdigest()
    digest = f"{members}-{store.add(f'made/{members}/{rank}', 1)}"
    with _naming:
        torch_naming = dist.distributed_c10d._hash_ranks_to_str
        dist.distributed_c10d._hash_ranks_to_str = lambda ranks: digest
        try:
            yield
        finally:
            dist.distributed_c10d._hash_ranks_to_str = torch_naming
