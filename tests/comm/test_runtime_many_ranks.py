"""What grows with the number of ranks when they join."""

from __future__ import annotations

import resource
from datetime import timedelta

import torch.distributed as dist

from tests.comm.starting import by_hand
from torchdistpackage.comm.runtime import find_free_port, leave, setup_distributed


class Counting(dist.Store):
    """A store that notes the bytes of each value that is set."""

    def __init__(self, store: dist.Store, sizes: list[int]):
        super().__init__()
        self.store, self.sizes = store, sizes

    def set(self, key, value):
        self.sizes.append(len(value))
        self.store.set(key, value)

    def get(self, key):
        return self.store.get(key)

    def add(self, key, value):
        return self.store.add(key, value)

    def wait(self, keys, timeout=timedelta(seconds=30)):
        self.store.wait(keys, timeout)

    def check(self, keys):
        return self.store.check(keys)


def published() -> tuple[list[int], int]:
    """The sizes of what gloo publishes for this rank, and the limit of descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    rank, world_size, *_ = setup_distributed(init_timeout_s=30)
    sizes: list[int] = []
    store = Counting(dist.distributed_c10d._get_default_store(), sizes)
    group = dist.ProcessGroupGloo(
        dist.PrefixStore("counted", store), rank, world_size, timedelta(seconds=30)
    )
    dist.barrier()  # rank 0 keeps the store, from which others may still read addresses
    del group
    leave()
    return sizes, resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_an_address_of_gloo_does_not_grow_with_the_ranks_and_descriptors_do_not_run_out(start):
    seen = {}
    for num_ranks in (2, 4):
        port = find_free_port()
        told = start(published, [by_hand(r, num_ranks, port) for r in range(num_ranks)])
        seen[num_ranks] = {max(sizes) for sizes, _ in told}
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert {limit for _, limit in told} == {min(hard, 1 << 16)}
    assert seen[2] == seen[4]
