"""Ranks of a test's own kind that use the GPUs there are: over NCCL several of them share one.

A `RankPool` gives processes that outlive a case, stacks of those that hang, and new ones after a
failure. Its ranks meet over gloo; for a case they leave that world and join as `setup_distributed`
does, with `share_gpus`. One rule: a case that raises leaves nothing in order, since the pool ends
its processes.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchdistpackage.comm.runtime import join, leave
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.environment.rendezvous import Rendezvous
from torchdistpackage.harness.pool import RankPool, Ranks
from torchdistpackage.launch.entrypoint import EntryPoint

MOST = 8


class DeviceRanks:
    """What tests call `ranks`: `ranks(size).run(function, *args)` on so many ranks.

    limit_s: of a call, set before each case. The ranks of a size, but one alone, end when another
    size is asked for: each process holds a context of its GPU. folder: for files to meet at.
    """

    def __init__(self, folder: Path, pool: RankPool) -> None:
        self.limit_s = 60.0
        self._folder, self._calls, self._size, self._pool = folder, 0, 1, pool

    def __call__(self, size: int) -> "_World":
        if size not in (1, self._size):
            if self._size > 1:
                self._pool.end(self._size)
            self._size = size
        return _World(self, self._pool(size))

    def next_store(self) -> str:
        self._calls += 1
        return str(self._folder / f"store{self._calls}")


class _World:
    def __init__(self, ranks: DeviceRanks, world: Ranks) -> None:
        self._ranks, self._world = ranks, world

    def run(self, fn: Callable[..., object], *args: object, **_: float) -> list[Any]:
        """A test may say a limit in seconds, which is that of another machine."""
        name = str(EntryPoint.of(fn))
        store, limit_s = self._ranks.next_store(), self._ranks.limit_s
        return self._world.run(in_world, store, name, args, timeout_s=limit_s)


def in_world(store: str, name: str, args: Sequence[object]) -> object:
    """In a rank: join the others on the devices there are, call, leave."""
    rank, size = dist.get_rank(), dist.get_world_size()
    leave()
    place = Rendezvous(rank, size, rank, size, 0, "127.0.0.1", (), store, "local", store=store)
    join(place, share_gpus=True)
    result = EntryPoint.of(name).resolve()(*args)
    if tpc.is_set:
        tpc.destroy()
    leave()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return result
