"""Who shares with whom: any group, node-local shards with replicas, and layouts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ddp.zero.beside_one_process import DIM, adamw, compare
from tests.train import parity
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.ddp.zero.shard_bounds import SLICE_BYTES
from torchdistpackage.layout.derive import blocks
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.parallel.tensor.init import initialize

STAGES = [{"stage": 1}, {"stage": 2}, {"stage": 3}]
stages = pytest.mark.parametrize("options", STAGES, ids=["1", "2", "3"])


def simple() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(DIM, 9), nn.Tanh(), nn.Linear(9, 5), nn.Linear(5, 3)).double()


def within(options: dict) -> None:
    if dist.get_rank() > 0:
        compare(simple, dist.new_group([1, 2], use_local_synchronization=True), **options)


@stages
def test_a_group_need_not_begin_at_rank_0(ranks, options):
    ranks(3).run(within, options)


def on_nodes(options: dict) -> None:
    """Two nodes of two: shards inside, copies across."""
    rank = dist.get_rank()
    groups = [dist.new_group(r) for r in ([0, 1], [2, 3], [0, 2], [1, 3])]
    zero = compare(
        simple, groups[rank // 2], replicas=groups[2 + rank % 2], size=4, index=rank, **options
    )
    held = sum(shard.tensor.numel() for shard in zero.shards)
    whole = sum(p.numel() for p in simple().parameters())
    padding = SLICE_BYTES // 8 * len(zero._buckets)
    assert held <= whole / 2 + padding < whole, "a shard is a half of the parameters"


@pytest.mark.few(1)
@stages
def test_shards_inside_a_node_with_replicas_across(ranks, options):
    ranks(4).run(on_nodes, options)


def unused_with_replicas() -> None:
    """Only a rank of the other node used it: the marks must travel that far."""
    rank = dist.get_rank()
    groups = [dist.new_group(r) for r in ([0, 1], [2, 3], [0, 2], [1, 3])]

    def run(net: nn.Module, x: torch.Tensor, index: int) -> torch.Tensor:
        return (net[3](net[2](torch.tanh(net[0](x)))) if index == 3 else net[0](x)).square().mean()

    zero = compare(
        simple, groups[rank // 2], replicas=groups[2 + rank % 2], size=4, index=rank, run=run
    )
    assert all(shard.tensor in zero.state for shard in zero.shards)


def test_what_one_rank_used_is_stepped_on_all_nodes(ranks):
    ranks(4).run(unused_with_replicas)


def held_over_replicas() -> None:
    """What is not trained is the first rank's everywhere, also on the other node."""
    rank = dist.get_rank()
    groups = [dist.new_group(r) for r in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tpc.setup_process_groups([("data", 4)])
    apart = {"group": groups[rank // 2], "replicas": groups[2 + rank % 2]}
    for options in (apart, {"zero_group": 2}):
        net = simple()
        net[2].requires_grad_(False)
        net.register_buffer("mean", torch.full((3,), float(rank)))
        with torch.no_grad():
            net[2].weight.fill_(rank)
        ZeroOptimizer(adamw(net), net, **options)
        assert net.mean.eq(0).all() and net[2].weight.eq(0).all(), options


def test_buffers_and_frozen_parameters_are_those_of_the_first_rank_on_all_nodes(ranks):
    ranks(4).run(held_over_replicas)


def weights(data: int, tensor: int, options: dict) -> parity.Held:
    tpc.setup_process_groups([("data", data), ("tensor", tensor)])
    shape = GPTShape(2, 8, 2, 17, 6, sequence_parallel=tensor > 1)
    model = GPT(shape, dtype=torch.float64)
    mesh, rank = tpc.topology.dense, dist.get_rank()
    initialize(model, model.layouts(), mesh, rank, 3)
    zero = ZeroOptimizer(
        adamw(model), model, layouts=model.layouts(), bucket_cap_mb=0.001, **options
    )
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(17, (4, 7), generator=draw)
    mine = ids.chunk(data)[tpc.get_dp_rank()]
    for _ in range(3):
        zero.zero_grad()
        total, count = model.loss(model(mine[:, :-1]), mine[:, 1:])
        (total / count).backward()
        zero.step()
    zero.finish()
    return [
        (
            layout.name,
            layout.shape,
            where,
            dict(model.named_parameters())[name][local].detach().clone(),
        )
        for name, layout in model.layouts().items()
        for where, local in blocks(layout, mesh, rank)
    ]


@pytest.mark.few(1)
@stages
@pytest.mark.parametrize(
    "degrees", [(2, 2), *(pytest.param(d, marks=pytest.mark.full) for d in ((2, 1), (1, 2)))]
)
def test_split_and_partial_parameters_train_as_in_one_process(ranks, degrees, options):
    truth = parity.whole(ranks(1).run(weights, 1, 1, {"stage": 1}))
    mine = parity.whole(ranks(degrees[0] * degrees[1]).run(weights, *degrees, options))
    assert mine.keys() == truth.keys()
    for name, weight in truth.items():
        # AdamW divides by the size of a gradient, so that of a tiny one shows its last digits
        torch.testing.assert_close(mine[name], weight, rtol=0, atol=1e-9)
