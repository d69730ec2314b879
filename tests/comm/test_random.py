"""Streams: alike along tensor, different along the rest, forks replayed by checkpointing."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torchdistpackage.comm.random import differ, fix_rand, seed_from, seed_rank
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import LaunchError
from torchdistpackage.topology.mesh import Mesh

MESH = Mesh((("data", 2), ("pipe", 2), ("tensor", 2)))


def draws(rank: int, fork: bool) -> tuple[float, ...]:
    seed_rank(1, MESH, rank)
    if fork:
        with differ(MESH.coord(rank)["tensor"]):
            return tuple(torch.rand(4).tolist())
    return tuple(torch.rand(4).tolist())


def test_replicated_draws_are_alike_along_tensor_only():
    seen = {rank: draws(rank, fork=False) for rank in range(8)}
    for a in range(8):
        for b in range(8):
            alike = MESH.coord(a) | {"tensor": 0} == MESH.coord(b) | {"tensor": 0}
            assert (seen[a] == seen[b]) == alike, (a, b)


def test_forked_draws_differ_on_every_rank_and_leave_the_stream_alike():
    assert len({draws(rank, fork=True) for rank in range(8)}) == 8
    after = []
    for rank in (0, 1):
        draws(rank, fork=True)
        after.append(torch.rand(3).tolist())
    assert after[0] == after[1]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_replays_shared_and_forked_draws(use_reentrant):
    masks: list[torch.Tensor] = []

    def block(x):
        shared = F.dropout(x, 0.5)
        with differ(1):
            mine = F.dropout(x, 0.5)
        masks.append(torch.stack([shared != 0, mine != 0]))
        return (shared * mine).sum()

    torch.manual_seed(0)
    x = torch.ones(64, requires_grad=True)
    checkpoint(block, x, use_reentrant=use_reentrant).backward()
    assert len(masks) == 2 and torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0][0], masks[0][1])


def test_seeds_tell_their_parts_apart():
    assert seed_from(1, "a") == seed_from(1, "a")
    assert len({seed_from(1, "a"), seed_from(2, "a"), seed_from(1, "b"), seed_from("1a")}) == 4
    assert all(0 <= seed_from(i) < 2**63 for i in range(100))


def test_fix_rand_repeats_and_tells_ranks_apart():
    seen = []
    for rank in (0, 0, 1):
        fix_rand(rank)
        seen.append(drawn())
    assert seen[0] == seen[1] != seen[2]
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(2222 + 1)
    assert drawn() == seen[2]


def drawn() -> tuple[float, ...]:
    """With all three libraries, as in a step with dropout."""
    mask = F.dropout(torch.ones(64), 0.5)
    return (*mask.tolist(), *numpy.random.rand(2), random.random())


def own_step(seeded) -> tuple[list[float], ...]:
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    found = []
    for rank in (tpc.rank, 0, 1000 + tpc.rank):
        if seeded:
            fix_rand(rank)
        else:
            seed_rank(rank)
        found.append(drawn()[: None if seeded else 64])
    return tuple(found)


@pytest.mark.parametrize("seeded", [True, False], ids=["fix_rand", "seed_rank"])
def test_with_tpc_masks_are_alike_over_tensor_ranks_and_different_over_data(ranks, seeded):
    mine, same, other = zip(*ranks(4).run(own_step, seeded), strict=True)
    if not seeded:  # one seed, and who this is comes from tpc
        assert same[0] == same[1] != same[2] == same[3]
        return
    assert mine[0] == mine[1] != mine[2] == mine[3]
    assert len(set(same)) == 1, "all with one rank draw alike, as without tpc"
    assert len(set(other)) == 4, "no rank of the mesh"


def test_without_tpc_a_rank_has_the_seed_it_always_had():
    fix_rand(5)
    mine = drawn()
    torch.manual_seed(2227)
    assert mine[:64] == drawn()[:64]
    with pytest.raises(LaunchError, match="tpc"):
        seed_rank(1)
