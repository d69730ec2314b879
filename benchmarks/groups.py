"""What tpc's groups cost: 64 ranks here, and one rank alone at sizes beyond this machine.

Those of 4,096 and 65,536 are of torch's fake back end: what a rank does by itself, without the
network's part, and the limit of which is the number of groups, not of ranks. A million ranks are
answered by arithmetic alone.
"""

import time

import torch
import torch.distributed as dist

from benchmarks.common import arguments, in_turns, local, rows, show, slowest, write
from torchdistpackage.comm import primitives
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.topology.mesh import topology


def group_times(sizes: tuple[tuple[str, int], ...]) -> dict[str, list[float]]:
    begin = time.perf_counter()
    setup_distributed()
    primitives.barrier()
    times = {"default group": [time.perf_counter() - begin]}
    begin = time.perf_counter()
    tpc.setup_process_groups(list(sizes))
    times["tpc.setup_process_groups"] = [time.perf_counter() - begin]
    for mode in ("data", "pipe", "tensor", "model"):
        group = tpc.get_group(mode)
        assert int(primitives.all_reduce(torch.tensor([1]), group)) == group.size()
    primitives.barrier()
    begin = time.perf_counter()
    tpc.destroy()
    times["tpc.destroy"] = [time.perf_counter() - begin]
    leave()
    return times


def fake_world(world_size: int) -> dict[str, list[float]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    class Store(FakeStore):
        def add(self, key: str, number: int) -> int:  # numbers the groups of one rank list
            return number

    rank = world_size // 3
    store = Store()  # held here: c10d alone would lose the Python half
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    times = {}
    sizes = [("data", -1), ("pipe", 8), ("tensor", 8)]
    for name, act in (("topology and groups", None), ("destroy", tpc.destroy)):
        begin = time.perf_counter()
        tpc.setup_process_groups(sizes) if act is None else act()
        times[f"{world_size:,} ranks: {name}"] = [time.perf_counter() - begin]
        if act is None:
            assert rank in tpc.get_ranks_in_group("data")
            assert tpc.get_group("data").size() == world_size // 64
    leave()
    return times


def million() -> None:
    world = topology([("data", -1), ("pipe", 16), ("context", 4), ("tensor", 8)], 2**20)
    for mode in ("data", "pipe", "context", "tensor", "model", "global"):
        assert 777_777 in world.group(777_777, mode)


def main() -> None:
    options = arguments(__doc__)
    sizes = (("data", 4), ("pipe", 4), ("tensor", 4))
    groups = rows(slowest(local(group_times, sizes, num_procs=64)))
    show("64 ranks here, data 4 x pipe 4 x tensor 4, slowest rank", groups, "ms")
    alone = {}
    for world_size in (4_096, 65_536):
        alone |= rows(local(fake_world, world_size, num_procs=1)[0])
    alone |= rows(in_turns({"2^20 ranks: all groups of one": million}, 50, None))
    show("one rank by itself", alone, "ms")
    write(options.json, {"unit": "ms", "groups": groups, "alone": alone})


if __name__ == "__main__":
    main()
