"""What our Python costs in a call: ours and the bare torch.distributed call on a back end that does
nothing.

torch's "fake" back end of 2 ranks in one process: a call returns at once, so what is left is the
host's work, and the difference is ours. Both sides take turns, many calls at a time, and the
thread's own processor time is taken, in which others on the machine do not count; the smallest of
the rounds is the cost.
"""

import time

import torch
import torch.distributed as dist

from benchmarks.common import arguments, local, write
from torchdistpackage.comm import primitives
from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.comm.runtime import leave
from torchdistpackage.harness.calls import GroupMember, tdp_call, torch_call

NUM_CALLS = 500
LIMIT_US = 5.0


def overhead(rounds: int) -> dict[str, dict[str, float]]:
    """By operation, microseconds a call: ours, bare, and by how much ours is more."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store = FakeStore()  # held here: c10d alone would lose the Python half
    dist.init_process_group("fake", store=store, rank=0, world_size=2)
    group = dist.group.WORLD
    assert group is not None and primitives.ranks_of(group) == (0, 1)
    member, found = GroupMember(group, (0, 1), 0), {}
    for operation in COLLECTIVES:
        x = torch.zeros(2)
        calls = {"ours": tdp_call(operation, x, member), "bare": torch_call(operation, x, member)}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                begin = time.thread_time()
                for _ in range(NUM_CALLS):
                    call()
                times[name].append((time.thread_time() - begin) / NUM_CALLS * 1e6)
        best = {name: min(taken) for name, taken in times.items()}
        found[operation] = best | {"ours - bare": best["ours"] - best["bare"]}
    leave()
    return found


def main() -> None:
    options = arguments(__doc__)
    found = local(overhead, max(options.rounds, 20), num_procs=1)[0]
    print(f"\nmicroseconds a call, smallest of rounds\n{'':16}{'ours':>8}{'bare':>8}{'more':>8}")
    for name, row in found.items():
        print(f"{name:16}{row['ours']:8.2f}{row['bare']:8.2f}{row['ours - bare']:8.2f}")
    over = [name for name, row in found.items() if row["ours - bare"] > LIMIT_US]
    print(f"above {LIMIT_US:g}: {', '.join(over) or 'none'}")
    write(options.json, {"unit": "us", "limit": LIMIT_US, "calls": found})


if __name__ == "__main__":
    main()
