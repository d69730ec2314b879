"""Node groups: whose they are, and when there is none."""

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import setup_node_groups, tpc
from torchdistpackage.errors import LaunchError, TopologyError


def sum_inside_my_node(num_per_node: int, with_tpc: bool) -> None:
    rank = dist.get_rank()
    if with_tpc:
        tpc.setup_process_groups([("data", dist.get_world_size())])
    group = setup_node_groups(num_per_node)
    assert group is not None
    first = rank // num_per_node * num_per_node
    mine = list(range(first, first + num_per_node))
    assert list(primitives.ranks_of(group)) == mine
    assert int(primitives.all_reduce(torch.tensor([1 << rank]), group)) == sum(1 << r for r in mine)
    if with_tpc:
        assert setup_node_groups(num_per_node) is group


@pytest.mark.parametrize("with_tpc", [False, True])
@pytest.mark.parametrize("num_per_node", [1, 2])
def test_ranks_of_a_node_share_a_group(ranks, num_per_node, with_tpc):
    ranks(4).run(sum_inside_my_node, num_per_node, with_tpc)


def one_node_or_unequal_ones() -> None:
    assert setup_node_groups() is None
    assert setup_node_groups(4) is None
    with pytest.raises(TopologyError, match=r"4 ranks do not fill nodes of 3 .*: 1 would be left"):
        setup_node_groups(3)
    with pytest.raises(TopologyError, match="size 0"):
        setup_node_groups(0)


def test_none_means_one_node_and_never_a_remainder(ranks):
    """An optimizer takes None for everybody, which unequal nodes would become unnoticed."""
    ranks(4).run(one_node_or_unequal_ones)


def test_ranks_are_needed():
    with pytest.raises(LaunchError, match=r"call setup_distributed\(\) first"):
        setup_node_groups()
