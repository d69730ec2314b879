"""What it costs until ranks can work: processes, imports, the default group, one all-reduce.

Compared with starting each rank as a fresh interpreter (torch's `spawn`), whose limit is one
`import torch` a rank and core; ours imports once and forks.
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.common import arguments, in_turns, local, rows, show, write
from torchdistpackage.comm import primitives
from torchdistpackage.comm.runtime import find_free_port, leave, setup_distributed

PRELOAD = ("torch", "torch.distributed", "numpy", "torchdistpackage.comm.runtime")
"""What `run_or_launch` imports once, for ranks that call `setup_distributed`."""


def arrive() -> None:
    rank, world_size, *_ = setup_distributed()
    total = primitives.all_reduce(torch.tensor([rank + 1]), dist.group.WORLD)
    assert int(total) == world_size * (world_size + 1) // 2
    leave()


def spawned(rank: int, world_size: int, port: str) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    assert int(total) == world_size * (world_size + 1) // 2
    dist.destroy_process_group()


def start(how: str, num_procs: int) -> None:
    if how == "fork server":
        local(arrive, num_procs=num_procs, preload=PRELOAD)
    else:
        multiprocessing.spawn(spawned, (num_procs, find_free_port()), nprocs=num_procs)


def main() -> None:
    options = arguments(__doc__)
    results = {}
    for num_procs, rounds in ((2, 3), (8, 1), (32, 1), (64, 1)):
        hows = ("fork server", "spawn") if num_procs <= 8 else ("fork server",)
        sides = {f"{num_procs} ranks, {how}": partial(start, how, num_procs) for how in hows}
        results |= rows(in_turns(sides, rounds, None))
    show("until the last rank of init + all-reduce is gone", results, "ms")
    write(options.json, {"unit": "ms", "results": results})


if __name__ == "__main__":
    main()
