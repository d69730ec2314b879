"""Ranks with different parameters get different endings, replicas the same."""

import pytest

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.compat.torchdistpackage.dist import get_mp_ckpt_suffix
from torchdistpackage.topology.mesh import topology


@pytest.mark.parametrize(
    ("config", "endings"),
    [
        ([("data", 2)], [".pth"] * 2),
        ([("data", 2), ("tensor", 2)], ["_tp_0.pth", "_tp_1.pth"] * 2),
        ([("pipe", 2), ("data", 2)], ["_pp_0.pth"] * 2 + ["_pp_1.pth"] * 2),
        (
            [("pipe", 2), ("data", 1), ("tensor", 2)],
            ["_tp_0_pp_0.pth", "_tp_1_pp_0.pth", "_tp_0_pp_1.pth", "_tp_1_pp_1.pth"],
        ),
    ],
)
def test_the_ending_tells_shards_and_stages_apart(config, endings):
    topo = topology(config, len(endings))
    for rank, ending in enumerate(endings):
        with tpc.using(topo, rank):
            assert get_mp_ckpt_suffix() == ending


def test_without_a_topology_there_is_nothing_to_tell_apart():
    assert get_mp_ckpt_suffix() == ".pth"
