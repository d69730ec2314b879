"""tpc over real processes and, through `using`, over none."""

import itertools
import logging
import threading

import pytest
import torch
import torch.distributed as dist

from tests.tells import facts_pattern
from torchdistpackage.comm import primitives
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.tpc import is_using_pp, resolve_group, tpc
from torchdistpackage.errors import CommError, LaunchError, TopologyError
from torchdistpackage.layout.derive import Creation
from torchdistpackage.topology.mesh import topology

ORDERS = list(itertools.permutations((("data", 2), ("pipe", 2), ("tensor", 2))))


def groups_agree(config: tuple[tuple[str, float], ...]) -> None:
    """Each handle sums over exactly the ranks that tpc says, in torch's order."""
    tpc.setup_process_groups(list(config))
    rank = dist.get_rank()
    for mode in ("data", "pipe", "tensor", "model", "global"):
        ranks = tpc.get_ranks_in_group(mode)
        group = tpc.get_group(mode)
        assert list(primitives.ranks_of(group)) == ranks
        assert ranks[tpc.get_group_rank(mode)] == rank == ranks[group.rank()]
        assert len(ranks) == tpc.get_group_size(mode) == group.size()
        total = primitives.all_reduce(torch.tensor([1 << rank]), group)
        assert int(total) == sum(1 << r for r in ranks)
        assert ranks in tpc.all_ranks(mode)
        assert tpc.is_first_group(mode) == (0 in ranks)
        assert tpc.is_first_in_group(mode) == (rank == ranks[0])
        assert tpc.is_last_in_group(mode) == (rank == ranks[-1])
        at = ranks.index(rank)
        assert tpc.get_next_global_rank(mode) == ranks[(at + 1) % len(ranks)]
        assert tpc.get_prev_global_rank(mode) == ranks[at - 1]
    assert tpc.get_group("model") is tpc.get_group("model")
    assert (tpc.get_dp_size(), tpc.get_pp_size(), tpc.get_tp_size(), tpc.get_mp_size()) == (
        2,
        2,
        2,
        4,
    )
    mesh = tpc.mesh
    assert mesh.mesh_dim_names == tuple(name for name, _ in config)
    assert mesh["tensor"].get_group() is tpc.get_group("tensor")
    before = tpc.groups
    tpc.setup_process_groups([("data", 8.0)])
    assert tpc.groups is not before and tpc.get_group("data") is dist.group.WORLD
    assert not tpc.is_mode_inited("pipe") and tpc.get_pp_size() == 1 and not is_using_pp()


@pytest.mark.few(2)
@pytest.mark.parametrize("config", ORDERS, ids=lambda c: "-".join(name for name, _ in c))
def test_groups_of_any_order_are_what_their_names_say(ranks, config):
    ranks(8).run(groups_agree, config)


def axes_of_size_one_share() -> None:
    tpc.setup_process_groups([("data", 2), ("pipe", 1), ("context", 1), ("tensor", 2)])
    assert tpc.get_group("pipe") is tpc.get_group("context")
    assert tpc.get_group("pipe").size() == 1
    assert tpc.get_group("model") is tpc.get_group("tensor")
    assert tpc.get_group("global") is dist.group.WORLD
    assert len(tpc.groups._made) == 3


def test_identical_rank_lists_share_one_group(ranks):
    ranks(4).run(axes_of_size_one_share)


def absent_axes(config: object) -> None:
    """Whatever is asked of an axis that is left out, the answer is that of one of size 1."""
    tpc.setup_process_groups(config)
    rank = dist.get_rank()
    assert tpc.is_mode_inited("data")
    for mode in ("pipe", "context", "tensor"):
        assert (
            tpc.get_ranks_in_group(mode) == [rank] == list(primitives.ranks_of(tpc.get_group(mode)))
        )
        assert tpc.all_ranks(mode) == [[0], [1]]
        assert tpc.get_next_global_rank(mode) == tpc.get_prev_global_rank(mode) == rank
        assert (tpc.get_group_rank(mode), tpc.get_group_size(mode)) == (0, 1)
        assert tpc.is_first_in_group(mode) and tpc.is_last_in_group(mode)
        assert tpc.is_first_group(mode) == (rank == 0) and not tpc.is_mode_inited(mode)
        assert resolve_group(None, mode) is tpc.get_group(mode)
    for ask in (tpc.get_ranks_in_group, tpc.get_group, tpc.all_ranks, tpc.get_next_global_rank):
        with pytest.raises(TopologyError, match=facts_pattern("'pip'", "data=2")):
            ask("pip")
    with pytest.raises(TopologyError, match=r"call tpc\.build_moe_groups first"):
        tpc.get_group_size("moe_dp")
    assert not tpc.is_mode_inited("moe_dp")


@pytest.mark.parametrize("config", [[("data", 2)], {"data": 2}], ids=["pairs", "mapping"])
def test_an_axis_that_is_left_out_has_one_rank_a_group(ranks, config):
    ranks(2).run(absent_axes, config)


def said_of_the_groups() -> list[tuple[str, str]]:
    """What is logged when groups are made, by level."""
    said: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("torchdistpackage.comm.tpc")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        tpc.setup_process_groups({"data": 1, "rows": 2})
        assert tpc.get_ranks_in_group("rows") == [0, 1]
        with pytest.raises(TopologyError, match="'expert' is not an axis"):
            tpc.setup_process_groups({"data": 1, "expert": 2})
        tpc.setup_process_groups({"data": 2})
        tpc.build_moe_groups(moe_ep_size=2)
        assert tpc.describe().splitlines()[-1] == "group moe_ep, ranks: [0, 1]"
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return said


def test_groups_are_told_and_unknown_axes_warned_about_once(ranks):
    told, silent = ranks(2).run(said_of_the_groups)
    assert silent == []
    assert [level for level, _ in told] == ["WARNING", "INFO", "INFO"]
    assert "'rows'" in told[0][1] and "data, pipe, context, tensor" in told[0][1]
    assert told[1][1].splitlines()[2:] == [
        "group rows, ranks: [0, 1]",
        "group model, ranks: [0, 1]",
    ]
    assert told[2][1] == "group data, ranks: [0, 1]"


def made_anew() -> None:
    """The same lists again, by ranks that are in different numbers of groups meanwhile."""
    for _ in range(3):
        tpc.setup_process_groups([("data", 2), ("tensor", 2)])
        if dist.get_rank() < 2:
            tpc.groups.of([0, 1])
            tpc.groups.of([dist.get_rank()])
        lists = [ranks for ranks in ((0, 1, 2), (1, 2, 3)) if dist.get_rank() in ranks]
        tpc.groups.prepare(map(Creation, lists))
        if dist.get_rank() < 3:
            total = primitives.all_reduce(torch.ones(1), tpc.groups.of([0, 1, 2]))
            assert int(total) == 3
        total = primitives.all_reduce(torch.ones(1), tpc.get_group("data"))
        assert int(total) == 2


def test_groups_can_be_made_again_and_by_ranks_that_are_in_others(ranks):
    ranks(4).run(made_anew)


def moe_groups() -> None:
    tpc.setup_process_groups([("data", 4), ("tensor", 2)])
    with pytest.raises(TopologyError, match=r"call tpc\.build_moe_groups first"):
        tpc.get_group("moe_ep")
    for wrong in ({"moe_dp_size": 3}, {"moe_dp_size": 2, "moe_ep_size": 4}, {"moe_ep_size": 3}):
        with pytest.raises(TopologyError, match="4 ranks of the data axis"):
            tpc.build_moe_groups(**wrong)
    with pytest.raises(TopologyError, match="give one"):
        tpc.build_moe_groups()
    tpc.build_moe_groups(moe_ep_size=2)
    data = tpc.get_ranks_in_group("data")
    mine = data.index(dist.get_rank())
    assert tpc.get_ranks_in_group("moe_ep") == data[mine // 2 * 2 : mine // 2 * 2 + 2]
    assert tpc.get_ranks_in_group("moe_dp") == data[mine % 2 :: 2]
    tpc.build_moe_groups(moe_dp_size=1)
    assert tpc.get_ranks_in_group("moe_dp") == [dist.get_rank()]


def test_expert_groups_cut_the_data_axis(ranks):
    ranks(8).run(moe_groups)


def wrong_product_is_refused_before_groups() -> None:
    with pytest.raises(TopologyError, match="is 8 ranks, but the world has 2"):
        tpc.setup_process_groups([("data", 4), ("tensor", 2)])
    with pytest.raises(TopologyError, match=r"size 1\.5"):
        tpc.setup_process_groups([("data", 1.5)])
    assert not tpc.is_set
    assert resolve_group(None, "tensor") is dist.group.WORLD
    tpc.setup_process_groups([("data", 2)])
    assert resolve_group(None, "tensor").size() == 1
    with pytest.raises(CommError, match="of which it is not one"):
        tpc.groups.of([1 - dist.get_rank()])
    tpc.destroy()
    tpc.destroy()


def test_what_does_not_tile_the_world_is_refused_on_every_rank(ranks):
    ranks(2).run(wrong_product_is_refused_before_groups)


def test_without_processes_tpc_answers_for_any_rank():
    topo = topology([("data", 4), ("pipe", 2), ("tensor", 2)], 16, expert=2)
    with pytest.raises(LaunchError, match=r"call tpc\.setup_process_groups"):
        tpc.get_dp_rank()
    for rank in range(16):
        with tpc.using(topo, rank):
            assert (tpc.get_dp_rank(), tpc.get_pp_rank(), tpc.get_tp_rank()) == (
                rank // 4,
                rank // 2 % 2,
                rank % 2,
            )
            assert tpc.all_dp_ranks()[0] == [0, 4, 8, 12]
            assert tpc.get_ranks_in_group("moe_ep")[0] in (rank, rank - 4)
            with pytest.raises(LaunchError, match="it has no groups"):
                tpc.get_group("data")
            with tpc.using(topo, 0):
                assert tpc.is_first_in_data_group() and tpc.is_first_in_model_group()
            assert tpc.is_last_in_data_group() == (rank >= 12)
    assert not tpc.is_set


def in_thread(body) -> object:
    """What `body` returns, run in a thread as any Python thread is."""
    result: list = []
    thread = threading.Thread(target=lambda: result.append(body()))
    thread.start()
    thread.join()
    return result[0]


def apart_and_together() -> None:
    def be_another_rank() -> tuple[bool, list[int]]:
        with tpc.isolated():
            before = tpc.is_set
            tpc.setup(topology([("tensor", 2)], 2), dist.get_rank())
            return before, tpc.get_ranks_in_group("tensor")

    tpc.setup_process_groups([("data", 2)])
    assert in_thread(lambda: tpc.get_ranks_in_group("data")) == [0, 1]
    assert in_thread(be_another_rank) == (False, [0, 1])
    assert tpc.get_dp_size() == 2 and tpc.get_tp_size() == 1
    with tpc.using(topology([("pipe", 4)], 4), 3), tpc.isolated():
        assert not tpc.is_set
        tpc.destroy()
    assert tpc.get_dp_rank() == dist.get_rank()
    in_thread(tpc.destroy)
    assert not tpc.is_set


def test_threads_share_the_place_of_their_process_unless_they_are_apart(ranks):
    ranks(2).run(apart_and_together)


def a_group_of_its_own() -> None:
    groups = tpc.groups if tpc.is_set else Groups(dist.get_rank())
    own = groups.of([0, 1], use="messages")
    assert own is not dist.group.WORLD and own is groups.of([1, 0], use="messages")
    assert groups.of([0, 1]) is dist.group.WORLD
    assert int(primitives.all_reduce(torch.ones(1), own)) == 2
    naming = dist.distributed_c10d._hash_ranks_to_str
    assert naming.__module__ == "torch.distributed.distributed_c10d", "it is torch's again"


def test_two_uses_of_the_same_ranks_may_have_two_groups(ranks):
    ranks(2).run(a_group_of_its_own)


def test_setup_needs_the_default_group():
    with pytest.raises(LaunchError, match=r"call setup_distributed\(\) first"):
        tpc.setup_process_groups([("data", 1)])


def a_world_after_the_other(folder: str) -> None:
    """The user ends torch's world under tpc's feet, and makes another one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    for again in range(2):
        dist.destroy_process_group()
        assert not tpc.is_set
        store = dist.FileStore(f"{folder}/{again}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        assert not tpc.is_set
        if again:
            tpc.destroy()
        tpc.setup_process_groups([("data", 2), ("tensor", 2)])
        group = tpc.get_group("tensor")
        assert primitives.all_reduce(torch.ones(1), group).item() == 2


def test_what_was_set_up_ends_with_its_world(ranks, tmp_path):
    ranks(4).run(a_world_after_the_other, str(tmp_path))
