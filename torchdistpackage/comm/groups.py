"""Process groups from rank lists: only those this rank is in, one for each different list.

Groups are scarce (threads, memory, and seconds to start and stop), so identical lists share
one, all axes of size 1 share one group of one, and a list of everybody is the default
group. Members alone take part in making a group, and wait for each other, so all must ask for
their groups in one order: that of layout/groups.py.
"""

from collections.abc import Iterable, Sequence

import torch.distributed as dist

from torchdistpackage.comm.companions import companions, leave_cpu, leave_reverse_group, on_cpu
from torchdistpackage.comm.connections import connect
from torchdistpackage.comm.creation import create, end, is_alive
from torchdistpackage.comm.primitives import Group, set_timeout
from torchdistpackage.errors import CommError
from torchdistpackage.layout.groups import Creation
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
        """Make groups that hold this rank, in this order (layout/groups.py), and connect them.

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
        for group in (_world(), *self._made.values(), *companions()):
            if is_alive(group):  # companions may be of a world that ended
                set_timeout(group, seconds)

    @property
    def are_there(self) -> bool:
        """Whether the default group is still that on top of which these were made."""
        return _world() is self._world

    def destroy(self) -> None:
        """End all groups made here, unless their world has ended; the default group stays."""
        for group in self._made.values() if self.are_there else ():
            leave_reverse_group(group)
            leave_cpu(group)
            end(group)
        self._made.clear()


def _world() -> Group | None:
    return dist.group.WORLD if dist.is_initialized() else None
