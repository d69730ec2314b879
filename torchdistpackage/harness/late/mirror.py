"""A world of one process: it is one rank, and all others hold what it holds."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from torchdistpackage.comm.runtime import leave
from torchdistpackage.harness.late import group
from torchdistpackage.harness.late.orders import LATE
from torchdistpackage.harness.late.strict import strictness
from torchdistpackage.harness.late.world import world


@contextmanager
def mirror(world_size: int, rank: int = 0, transport: str = LATE) -> Iterator[None]:
    """Inside, this process is `rank` of `world_size` under the late transport, without peers.

    Every other rank is taken to hold what this one holds: a sum is the value times the ranks of the
    group, a gather copies of it, and a message received is the one that was sent. Milliseconds.
    transport: an order of completion (orders.py).

    Raises:
        RaceError: a call was not waited for.
    """
    group.register()
    group._mirrored.append(rank)
    try:
        dist.init_process_group(LATE, store=dist.HashStore(), rank=rank, world_size=world_size)
        with world.job(transport, rank), strictness(transport):
            yield
    except BaseException as error:
        error.add_note(f"transport: {transport}")
        raise
    finally:
        leave()
        group._mirrored.pop()
