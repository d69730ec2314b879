"""The cost of a start on GPUs apart from the model: connections, their memory, the store. No torch.

Requests are an upper estimate: tests/train/test_many_ranks.py counts about 20 of a rank until it
has joined. Memory of communicators (plan/memory.py) is an estimate too: NCCL allocates it outside
of torch, by channels, and publishes no formula.
"""

import resource
from dataclasses import dataclass

from torchdistpackage.environment.rendezvous import (
    OWN_DESCRIPTORS,
    STORE_CONNECTIONS,
    store_descriptors,
)
from torchdistpackage.plan.memory import communicators
from torchdistpackage.plan.run_plan import Plan
from torchdistpackage.text import size_text, text_table

REQUESTS = 100
"""Requests of one rank to rank 0's store until it has built its run, groups left out."""
REQUESTS_OF_GROUP = 12
"""Requests of one rank for each group that it is in."""


@dataclass(frozen=True, slots=True)
class StartBill:
    """The start of one rank; rank 0 if it differs.

    communicators, peers: of NCCL: groups of several ranks, and ranks that messages go to.
    device_bytes: their estimated memory. requests: to the store, of all ranks together.
    descriptors: of rank 0, which keeps the store; rank_descriptors: of any other.
    """

    communicators: int
    peers: int
    device_bytes: int
    requests: int
    descriptors: int
    rank_descriptors: int

    def warnings(self) -> list[str]:
        """Return a warning for each limit of this machine that the start exceeds."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard == resource.RLIM_INFINITY or hard >= self.descriptors:
            return []
        return [
            f"rank 0 needs {self.descriptors:,} open files, and this machine allows {hard:,} "
            f"(ulimit -Hn); raise the limit on the node of rank 0"
        ]


def start_bill(plan: Plan, rank: int = 0) -> StartBill:
    """Return the bill of a plan, counted for `rank`; ranks differ little."""
    groups = [x for x in plan.creations(rank) if len(x.ranks) > 1]
    connected = communicators(groups, rank, plan.topology, plan.config.parallel.cp_comm_type)
    beside = sum(len(x.ranks) for x in groups if x.neighbours)  # gloo, for headers of messages
    world = plan.world_size
    return StartBill(
        communicators=connected.number,
        peers=connected.peers,
        device_bytes=connected.device_bytes,
        requests=world * (REQUESTS + REQUESTS_OF_GROUP * len(groups)) if world > 1 else 0,
        descriptors=store_descriptors(world) + beside,
        rank_descriptors=OWN_DESCRIPTORS + STORE_CONNECTIONS + beside,
    )


def start_table(plan: Plan) -> list[str]:
    """Return the bill as a table; [] if a rank is alone."""
    if plan.world_size == 1:
        return []
    bill = start_bill(plan)
    sharing = plan.ranks_per_gpu
    shared = [("ranks that share a GPU", f"{sharing}")] if sharing > 1 else []
    rows = [
        *shared,
        ("communicators of a rank", f"{bill.communicators}"),
        ("ranks it exchanges messages with", f"{bill.peers}"),
        ("GPU memory of both, estimated", size_text(bill.device_bytes)),
        ("requests to rank 0's store", f"{bill.requests:,}"),
        ("open files of rank 0", f"{bill.descriptors:,}"),
        ("open files of any other rank", f"{bill.rank_descriptors:,}"),
    ]
    return [f"start on GPUs\n{text_table(rows)}"]
