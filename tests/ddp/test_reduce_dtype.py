"""`reduce_dtype`: gradients travel as bf16; each rank adds up its own in float32, to the bit."""

from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.each import each
from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.debug_checks import checked_calls
from torchdistpackage.comm.tpc import setup_node_groups
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.ddp.zero.options import replica_group
from torchdistpackage.optim.clip import clip_grad_norm_

BF16 = torch.bfloat16
SIZES = (3000, 700, 1500, 40)
SMALL_MB = 0.008
"""So that there are three buckets or more."""


class Weights(nn.Module):
    """The gradient of each parameter is its part of the input, to the bit."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.held = nn.ModuleList(nn.Module() for _ in SIZES)
        for each_module, size in zip(self.held, SIZES, strict=True):
            each_module.weight = nn.Parameter(torch.ones(size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(SIZES)
        return sum((m.weight * part).sum() for m, part in zip(self.held, parts, strict=True))


def drawn(rank: int, step: int, micro: int, dtype: torch.dtype = torch.float32) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randn(sum(SIZES), generator=draw).to(dtype)


def own_sum(rank: int, step: int, num_micro: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return reduce(
        torch.add, [drawn(rank, step, i, dtype).float() for i in range(num_micro)]
    )  # in float32, from left to right


def rounded(x: Tensor) -> Tensor:
    return x.to(BF16).float()


def ddp_bits(dtype: torch.dtype, options: dict) -> None:
    """Three microbatches, of which the last reduces, and two ranks: their sum is rounded once."""
    me, net = dist.get_rank(), Weights(dtype)
    ddp = NaiveDDP(
        net, bucket_cap_mb=SMALL_MB, reduce_dtype=BF16, keep_order=True, fp32_grads=True, **options
    )
    assert ddp.reducer.num_buckets > 2
    mean = 1 if options.get("reduce_op") == "sum" else 2
    for step in range(2):
        ddp.zero_grad()
        with ddp.no_sync():
            for i in range(2):
                ddp(drawn(me, step, i, dtype)).backward()
        ddp(drawn(me, step, 2, dtype)).backward()
        first, second = (rounded(own_sum(r, step, 3, dtype) / mean) for r in range(2))
        expected = rounded(first + second).split(SIZES)
        for p, total in zip(net.parameters(), expected, strict=True):
            assert torch.equal(p.grad, total)
        assert not torch.equal(net.held[0].weight.grad, (first + second)[: SIZES[0]])


def test_two_ranks_round_their_sum_once(ranks):
    cases = [
        (torch.float32, {}),
        (torch.float32, {"reduce_op": "sum", "sync": True}),
        (BF16, {"reduce_op": "sum"}),
    ]
    ranks(2).run(each, ddp_bits, cases)


def ddp_bar() -> None:
    """n numbers and n - 1 sums are rounded, each by 2**-8 of it at most."""
    me, size, net = dist.get_rank(), dist.get_world_size(), Weights()
    ddp = NaiveDDP(net, bucket_cap_mb=SMALL_MB, reduce_dtype=BF16, reduce_op="sum")
    ddp(drawn(me, 0, 0)).backward()
    found = torch.cat([p.grad for p in net.parameters()])
    every = [drawn(r, 0, 0).double() for r in range(size)]
    largest = sum(x.abs() for x in every)
    assert ((found - sum(every)).abs() <= 1.02 * size * 2.0**-8 * largest).all()
    for other in primitives.gather_objects(found):
        assert torch.equal(found, other), "ranks stay equal to the bit"


def test_more_ranks_are_as_near_as_their_roundings(ranks):
    ranks(4).run(ddp_bar)


def zero_bits(stage: int, dtype: torch.dtype, num_micro: int, options: dict) -> None:
    """An owner adds what comes, rounded, to its own, which is not; so for any number of ranks."""
    group = world()
    me, size, net = group.rank(), group.size(), Weights(dtype)
    inner = torch.optim.SGD(net.parameters(), lr=0.5)
    accumulates = {} if stage > 1 else {"num_grad_acc_iter": num_micro}
    zero = ZeroOptimizer(
        inner,
        net,
        stage=stage,
        bucket_cap_mb=SMALL_MB,
        reduce_dtype=BF16,
        reduce_op="sum",
        **accumulates,
        **options,
    )
    before = {id(s): s.tensor.detach().clone() for s in zero.shards}
    for i in range(num_micro):
        net(drawn(me, 0, i, dtype)).backward()
    zero.reducer.finish()
    # from stage 2 on every backward is summed over the ranks, and the owner adds these up
    sums = range(num_micro) if stage > 1 else [None]
    totals = [owned(me, size, i, num_micro, dtype) for i in sums]
    expected = dict(zip(net.parameters(), reduce(torch.add, totals).split(SIZES), strict=True))
    for s in zero.shards:
        assert torch.equal(s.tensor.grad.flatten(), expected[s.parameter][s.start : s.stop])
    mine = sum(s.tensor.grad.double().square().sum() for s in zero.shards)
    norm = primitives.all_reduce(torch.as_tensor(mine), group).sqrt()
    torch.testing.assert_close(clip_grad_norm_(zero, 1.0).double(), norm, rtol=1e-6, atol=0)
    zero.step()
    zero.finish()
    for s in zero.shards:
        stepped = before[id(s)] - 0.5 * s.tensor.grad
        torch.testing.assert_close(s.tensor.detach(), stepped, rtol=1e-6, atol=1e-8)
    weights = torch.cat([p.detach() for p in net.parameters()])
    assert dtype == BF16 or not torch.equal(weights, rounded(weights)), "parameters keep all bits"
    for other in primitives.gather_objects(weights):
        assert torch.equal(weights, other), "ranks stay equal to the bit"


def owned(me: int, size: int, micro: int | None, num_micro: int, dtype: torch.dtype) -> Tensor:
    """What this rank makes of all gradients, of one backward or (None) of all."""
    parts = [
        own_sum(r, 0, num_micro, dtype) if micro is None else drawn(r, 0, micro, dtype).float()
        for r in range(size)
    ]
    return reduce(torch.add, [x if r == me else rounded(x) for r, x in enumerate(parts)])


ZERO = [
    (1, torch.float32, 2, {}),
    (2, torch.float32, 2, {}),
    (3, BF16, 2, {}),
    (1, BF16, 1, {"whole": True}),
    (2, torch.float32, 1, {"overlap": False}),
    (3, torch.float32, 1, {"offload": True}),
]


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [3, 2])
def test_an_owner_adds_rounded_gradients_to_its_own(ranks, size):
    ranks(size).run(each, zero_bits, ZERO)


def inside_nodes() -> None:
    """A sum inside a node of two ranks, then one of two nodes, which travels rounded too."""
    me, net = dist.get_rank(), Weights()
    node = setup_node_groups(2)
    inner = torch.optim.SGD(net.parameters(), lr=0.5)
    zero = ZeroOptimizer(
        inner, net, group=node, replicas=replica_group(node), reduce_dtype=BF16, reduce_op="sum"
    )
    net(drawn(me, 0, 0)).backward()
    zero.reducer.finish()
    index = me % 2
    first, second = (
        drawn(first + index, 0, 0) + rounded(drawn(first + 1 - index, 0, 0)) for first in (0, 2)
    )
    expected = dict(
        zip(net.parameters(), rounded(rounded(first) + rounded(second)).split(SIZES), strict=True)
    )
    for s in zero.shards:
        assert torch.equal(s.tensor.grad.flatten(), expected[s.parameter][s.start : s.stop])


@pytest.mark.late_in_full
def test_sums_over_nodes_travel_rounded(ranks):
    ranks(4).run(inside_nodes)


def as_wire_dtype() -> None:
    """Alone it speaks of gradients; `wire_dtype` also of them where it is not given."""
    found = []
    for options in ({"wire_dtype": BF16}, {"wire_dtype": BF16, "reduce_dtype": torch.float32}):
        net = Weights()
        zero = ZeroOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), net, **options)
        net(drawn(dist.get_rank(), 0, 0)).backward()
        zero.reducer.finish()
        found.append(torch.cat([s.tensor.grad.flatten() for s in zero.shards]))
        zero.step()
        zero.finish()
        weights = torch.cat([p.detach() for p in net.parameters()])
        assert torch.equal(weights, rounded(weights)), "parameters were gathered in bf16"
    exact = sum(drawn(r, 0, 0) / 2 for r in range(2))
    mine = dict(zip(net.parameters(), exact.split(SIZES), strict=True))
    expected = torch.cat([mine[s.parameter][s.start : s.stop] for s in zero.shards])
    assert torch.equal(found[1], expected)
    assert not torch.equal(found[0], expected)


@pytest.mark.full
def test_parameters_and_gradients_have_each_their_own(ranks):
    ranks(2).run(as_wire_dtype)


def compared() -> None:
    with checked_calls():
        as_wire_dtype()


@pytest.mark.full
def test_ranks_compare_what_travels(ranks):
    ranks(2).run(compared)
