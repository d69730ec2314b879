"""What the ranks of a large run say in a hang: rank 77 has issued one call of all ranks less."""

from torchdistpackage.harness.hang.dump import Dump, Process, State
from torchdistpackage.topology.mesh import Topology, topology

LATE = 77
_STACK = "".join(
    f'  File "/opt/venv/lib/python3.12/site-packages/torchdistpackage/train/module_{i}.py", line '
    f"{100 + i}, in function_{i}\n    result = self.something(argument, other_argument)\n"
    for i in range(25)
)


def topology_of(num_ranks: int) -> Topology:
    return topology([("data", num_ranks // 64), ("pipe", 8), ("tensor", 8)], num_ranks)


def dump_of(rank: int, num_ranks: int, topo: Topology) -> Dump:
    groups = [
        {"ranks": list(topo.group(rank, mode)), "axis": mode, "issued": 1000, "done": None}
        for mode in topo.dense.names
    ]
    everybody = list(range(num_ranks))
    groups.append({"ranks": everybody, "axis": "", "issued": 1000, "done": None})
    issued = 50 - (rank == LATE)
    groups.append({"ranks": everybody, "axis": "", "issued": issued, "done": 49})
    call = {"shape": [4096, 1024], "dtype": "bfloat16", "peer": None, "action": "F 3 5"}
    calls = [
        {
            **call,
            "group": i % 4,
            "operation": "all_reduce",
            "sequence": 936 + i,
            "state": "issued",
            "age_s": 10.0 + rank / 7 + i,
        }
        for i in range(63)
    ]
    state = "issued" if rank == LATE else "waiting"
    last = {"operation": "all_gather", "sequence": issued, "dtype": "float32", "action": None}
    calls.append({**call, **last, "group": 4, "state": state, "age_s": 130.0, "shape": [4096]})
    snapshot = {"time_s": 0.0, "step": 100, "phase": "forward", "groups": groups, "peers": []}
    return Dump(
        rank,
        State.DUMPED,
        Process(f"node{rank // 8:04d}", 1000 + rank, "1", "pid"),
        1000.0 + rank / 3,
        step=100,
        over_s=130.0,
        snapshot={**snapshot, "calls": calls},
        stacks=(_STACK, _STACK, _STACK),
        reports=True,
        limit_s=120.0,
        flights=[],
    )
