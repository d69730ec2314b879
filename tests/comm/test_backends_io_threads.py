"""The threads that read sockets for gloo yield their cores, and nobody else's do."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives
from torchdistpackage.comm.backends import deprioritize


def policies() -> dict[str, set[int]]:
    """Scheduling policies of the threads of this process, by name."""
    found: dict[str, set[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        name = (task / "comm").read_text().strip()
        found.setdefault(name, set()).add(os.sched_getscheduler(int(task.name)))
    return found


def a_group_of_the_users() -> None:
    deprioritize(False)
    before = policies()
    group = dist.new_group([0, 1])
    assert isinstance(group, primitives.Group)
    primitives.all_reduce(torch.ones(1), group)
    after = policies()
    readers = "gloo_tcp_loop"
    if readers not in before:  # torch 2.11
        assert deprioritize() == 0 and policies() == after
        dist.destroy_process_group(group)
        return
    assert before.pop(readers) == {os.SCHED_OTHER}
    assert after.pop(readers) == {os.SCHED_BATCH}
    assert all(os.SCHED_BATCH not in found for found in after.values())
    assert deprioritize(False) >= 2, "one of the world, one of the group"
    assert policies()[readers] == {os.SCHED_OTHER}
    deprioritize()
    dist.destroy_process_group(group)


def test_every_group_that_we_use(ranks):
    ranks(2).run(a_group_of_the_users)


def test_where_nobody_reads_nothing_happens():
    before = policies()
    assert deprioritize() == 0
    assert policies() == before
