"""Twins: a second group of the same ranks, over whose connections messages downwards go."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from tests.comm.test_sharded_flat import there_and_back
from torchdistpackage.comm import groups
from torchdistpackage.comm import primitives as p
from torchdistpackage.comm.groups import Groups, make_duplex_groups, reverse_group
from torchdistpackage.comm.transport import sharded_flat
from torchdistpackage.errors import CommError

pytestmark = pytest.mark.own_transport("gloo's second connection")


@contextmanager
def noted() -> Iterator[set[tuple[p.Group, str, int]]]:
    """(group, `send` or `recv`, peer) of all messages inside."""
    messages: set[tuple[p.Group, str, int]] = set()
    plain = {name: getattr(dist.ProcessGroup, name) for name in ("send", "recv")}

    def noting(name: str):
        def call(self, tensors, peer, tag):
            messages.add((self, name, peer))
            return plain[name](self, tensors, peer, tag)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in plain:
            patch.setattr(dist.ProcessGroup, name, noting(name))
        yield messages


def each_way(up: p.Group, down: p.Group, peers: Iterable[int]) -> set[tuple[p.Group, str, int]]:
    """What is noted of messages with these peers, both ways."""
    mine, found = up.rank(), set()
    for i in peers:
        found |= {(up if i > mine else down, "send", i), (down if i > mine else up, "recv", i)}
    return found


def both_ways() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = Groups(rank).of(range(size), use="slices")
    assert reverse_group(group) is None
    make_duplex_groups([group, group])
    twin = reverse_group(group)
    assert twin is not None and twin is not group and p.ranks_of(twin) == p.ranks_of(group)
    there_and_back(group)

    with noted() as messages:
        sharded_flat.start_reduce_scatter_v(
            torch.ones(4 * size), [4 * i for i in range(size + 1)], group
        ).wait()
    assert messages == each_way(group, twin, {*range(size)} - {rank})


@pytest.mark.few(2)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_and_gathers_go_down_over_the_twin(ranks, size):
    ranks(size).run(both_ways)


def ended() -> None:
    made = Groups(dist.get_rank())
    group = made.of([0, 1], use="a pair")
    alone = made.of([dist.get_rank()])
    make_duplex_groups([alone, group])
    twin = reverse_group(group)
    assert reverse_group(alone) is None
    made.set_timeout(70)
    assert twin._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 70
    dist.barrier()
    other = made.of([0, 1], use="another pair")
    make_duplex_groups([other])
    dist.destroy_process_group(reverse_group(other))
    made.set_timeout(80)  # of those that there are
    assert twin._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 80
    groups._reverse_groups.pop(other)
    dist.barrier()
    made.destroy()
    assert twin not in dist.distributed_c10d._world.pg_map and group not in groups._reverse_groups


def test_a_twin_ends_with_its_group(ranks):
    ranks(2).run(ended)


def alone_there() -> float:
    group = Groups(dist.get_rank()).of([0, 1], use="a pair")
    p.set_timeout(group, 0.5)
    began = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(CommError, match=r"ranks \(0, 1\) could not make a second group"):
            make_duplex_groups([group])
    return time.monotonic() - began


def test_who_does_not_come_to_make_a_twin_is_not_waited_for(ranks):
    assert ranks(2).run(alone_there)[0] < 5
