"""One rank of a layout without the others, for fake tensors (train/stage_trace.py).

Its calls return at once, with uninitialized memory in place of what other ranks would have sent. It
has a thread and a world of torch.distributed of its own, so a process that is a rank can run it.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torchdistpackage.comm.backends import Transport, register_transport
from torchdistpackage.comm.flight_recorder import FlightRecorder, recorder
from torchdistpackage.comm.group_state import drop_states
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.tpc import RankContext, tpc
from torchdistpackage.layout.derive import Creation
from torchdistpackage.thread_ranks.own_backend import Collective, OwnGroup, OwnWork, Tensors
from torchdistpackage.thread_ranks.threads import settings_kept, worlds
from torchdistpackage.topology.mesh import Topology

_Result = TypeVar("_Result")
BACKEND = "alone"
register_transport(Transport(BACKEND))


def run_alone(body: Callable[[], _Result], layout: Topology, rank: int) -> _Result:
    """Return what `body` returns in a thread that is `rank` of `layout`, for which `tpc` is set up.

    Raises:
        CommError: other ranks are running as threads of this process.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def main() -> None:
        try:
            torch_worlds.enter()
            groups = _GroupsAlone(rank, layout.world_size)
            moe = layout.expert.axis_size("expert") > 1
            with tpc.acting(RankContext(layout, rank, groups, moe)):
                results.append(body())
            groups.destroy()
        except BaseException as error:  # raised again in the thread that asked
            errors.append(error)

    record = recorder.__dict__
    with worlds() as torch_worlds, settings_kept():
        recorder.__dict__ = vars(FlightRecorder())
        try:
            thread = threading.Thread(target=main, name=f"rank {rank} alone")
            thread.start()
            # this thread must not use torch's world before it is put back
            thread.join()
        finally:
            recorder.__dict__ = record
    if errors:
        raise errors[0]
    return results[0]


class _WorkAlone(OwnWork):
    """The handle of a call that is done."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class GroupAlone(OwnGroup):
    """One member's end of a group without the other members."""

    def collective(self, call: Collective, is_async: bool) -> dist.Work:
        return _WorkAlone(call.writes or call.like)

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> dist.Work:
        return _WorkAlone(tensors)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work:
        return _WorkAlone(tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        return _WorkAlone(tensors)


class _GroupsAlone(Groups):
    """The groups of a rank that runs alone; to create one waits for nobody."""

    def __init__(self, rank: int, world_size: int):
        distributed_c10d._update_default_pg(_group(rank, range(world_size)))
        super().__init__(rank)

    def of(
        self,
        ranks: Sequence[int],
        *,
        name: str | None = None,
        use: str = "",
        connects: bool = True,
        axes: Sequence[str] = (),
    ) -> dist.ProcessGroup:
        key = tuple(sorted(ranks))
        if (key, use) not in self._made:
            self._made[key, use] = _group(self._rank, key, use)
        return self._made[key, use]

    def prepare(self, planned: Iterable[Creation]) -> None:
        for creation in planned:
            self.of(creation.ranks)

    def destroy(self) -> None:
        drop_states(*self._made.values())
        self._made.clear()


def _group(rank: int, ranks: Sequence[int], use: str = "") -> GroupAlone:
    """Return a new group that is registered with torch.distributed."""
    name = f"{BACKEND} {use} {tuple(ranks)}"
    group = GroupAlone(list(ranks).index(rank), len(ranks), name, BACKEND)
    world = distributed_c10d._world
    world.pg_map[group] = BACKEND, None  # type: ignore[assignment]
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {member: i for i, member in enumerate(ranks)}
    return group
