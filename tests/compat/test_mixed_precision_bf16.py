"""Bf16ZeroOptimizer: built over an optimizer alone, on whatever group of ranks."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from tests.ddp import test_bucket_plan_sizes
from tests.ddp.zero import test_safety
from tests.each import each
from tests.tells import facts_pattern
from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import world
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.tpc import setup_node_groups
from torchdistpackage.compat.torchdistpackage.mixed_precision import Bf16ZeroOptimizer
from torchdistpackage.ddp.zero.options import replica_group
from torchdistpackage.errors import TopologyError

STEPS, WIDTH = 5, 6
BF16 = torch.bfloat16


def build(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    """Two of its parameters have another dtype than the first one."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3), nn.Linear(3, 3))
    return net.to(dtype)


def adamw(net: nn.Module) -> optim.Optimizer:
    return optim.AdamW(
        [{"params": net[2].parameters()}, {"params": net[0].parameters(), "lr": 2e-3}]
    )


def inputs(step: int, num: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """(num, 2, 4): a part for each rank."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(num, 2, 4, generator=draw, dtype=torch.float64).to(dtype)


def used(net: nn.Module, x: Tensor) -> Tensor:
    return net[2](torch.tanh(net[0](x.flatten(0, -2)))).square().mean()


def train(net: nn.Module, optimizer: optim.Optimizer, parts: list[Tensor], num_backwards: int):
    for first in range(0, len(parts), num_backwards):
        for x in parts[first : first + num_backwards]:
            used(net, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def is_the_plain_one(num_backwards: int, options: dict) -> None:
    """Started elsewhere on each rank and stepped on its part: the plain one's on the whole."""
    me, size = world().rank(), world().size()
    net, twin = build(seed=me), build(seed=0)
    optimizer, reference = Bf16ZeroOptimizer(adamw(net), **options), adamw(twin)
    scheduler, other = (optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, reference))
    parts = [inputs(step, size) for step in range(STEPS * num_backwards)]
    for _ in range(2):
        train(net, optimizer, [x[me] for x in parts], num_backwards)
        train(twin, reference, parts, num_backwards)
        scheduler.step()
        other.step()
    trained = [0, 2]
    for i in trained:
        torch.testing.assert_close(net[i].state_dict(), twin[i].state_dict(), rtol=0, atol=1e-12)
    torch.testing.assert_close(optimizer.state_dict(), reference.state_dict(), rtol=0, atol=1e-12)
    held = sum(shard.tensor.numel() for shard in optimizer.shards)
    everything = sum(p.numel() for i in trained for p in twin[i].parameters())
    assert held <= -(-everything // size) + 16  # padding to a cache line


MODES = [
    {},
    {"stage": 1},
    {"stage": 1, "overlap_comm": True},
    {"stage": 2, "overlap_comm": True, "bucketize": False},
    {"stage": 1, "bucket_size": 10},
]


@pytest.mark.parametrize("num_backwards", [pytest.param(1, marks=pytest.mark.full), 3])
def test_every_mode_is_the_plain_optimizer_on_the_whole_batch(ranks, num_backwards):
    ranks(2).run(each, is_the_plain_one, [(num_backwards, options) for options in MODES])


def test_a_group_of_one_steps_too(ranks):
    ranks(1).run(each, is_the_plain_one, [(2, {"stage": s, "bucketize": False}) for s in (1, 2)])


def when_they_leave(in_backward: bool, options: dict) -> None:
    net = build()
    optimizer = Bf16ZeroOptimizer(adamw(net), **options)
    used(net, inputs(0, 2)[world().rank()]).backward()
    assert all((p.grad is None) == in_backward for i in (0, 2) for p in net[i].parameters())
    assert (optimizer.reducer.num_buckets > 1) == (not options.get("bucketize", True))


def test_gradients_leave_in_the_backward_or_in_the_step(ranks):
    cases = [
        (True, {}),
        (True, {"stage": 1, "overlap_comm": True}),
        (False, {"stage": 1, "bucketize": False}),
    ]
    ranks(2).run(each, when_they_leave, cases)


def on_a_group_that_is_not_the_first() -> None:
    """Ranks 1 and 3 share; 0 and 2 are another group with numbers of their own."""
    rank = world().rank()
    group = Groups(rank).of([rank % 2, rank % 2 + 2])
    net, twin = build(seed=rank), build(seed=rank % 2)
    optimizer, reference = Bf16ZeroOptimizer(adamw(net), group), adamw(twin)
    parts = [inputs(step, 4) for step in range(STEPS)]
    train(net, optimizer, [x[rank] for x in parts], 1)
    train(twin, reference, [x[rank % 2 :: 2] for x in parts], 1)
    torch.testing.assert_close(net[0].state_dict(), twin[0].state_dict(), rtol=0, atol=1e-12)


def test_any_group_of_ranks(ranks):
    ranks(4).run(on_a_group_that_is_not_the_first)


def inside_nodes() -> None:
    """Shards stay inside a node of two ranks, sums go over all four."""
    rank, size = world().rank(), world().size()
    node = setup_node_groups(2)
    net, twin = build(seed=rank), build(seed=0)
    optimizer = Bf16ZeroOptimizer(adamw(net), node, replicas=replica_group(node))
    reference = adamw(twin)
    parts = [inputs(step, size) for step in range(STEPS)]
    train(net, optimizer, [x[rank] for x in parts], 1)
    train(twin, reference, parts, 1)
    torch.testing.assert_close(net[0].state_dict(), twin[0].state_dict(), rtol=0, atol=1e-12)
    held = sum(shard.tensor.numel() for shard in optimizer.shards)
    assert held <= (2 * WIDTH * 4 + WIDTH * 2 + 3) // 2 + 16, "half of it, not a quarter"


def test_shards_inside_a_node(ranks):
    ranks(4).run(inside_nodes)


def places() -> None:
    rank = world().rank()
    assert replica_group(None) is None and replica_group(world()) is None
    node = setup_node_groups(2)
    assert primitives.ranks_of(replica_group(node)) == (rank % 2, rank % 2 + 2)
    group = Groups(rank).of([3] if rank == 3 else [0, 1, 2])
    with pytest.raises(TopologyError, match=r"\(3,\)\] do not tile"):
        replica_group(group)


def test_the_replica_group_within_other_groups(ranks):
    ranks(4).run(places)


def masters(is_bf16: bool) -> None:
    """16 steps of 2^-12 from one are 2^-8 in fp32, and none at all in bf16, whose step is 2^-8."""
    module = nn.ParameterList([torch.ones(30, 5, dtype=BF16), torch.ones(2, dtype=BF16)])
    inner = optim.SGD(module.parameters(), lr=2.0**-12)
    optimizer = Bf16ZeroOptimizer(inner, bf16_master_weights=is_bf16)
    for _ in range(16):
        # gradients of 0.5 and 1.5, 1 in the mean
        (torch.cat([p.flatten() for p in module]).sum() * (world().rank() + 0.5)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = 1.0 if is_bf16 else 1 - 2.0**-8
    for number, p in enumerate(module):
        assert p.dtype == BF16 and (p == expected).all()
        state = optimizer.state_dict()["state"].get(number, {})
        assert is_bf16 or (state["master"].dtype == torch.float32 and (state["master"] == p).all())
        assert ("master" in state) != is_bf16
    held = {shard.tensor.dtype for shard in optimizer.shards}
    assert held == {BF16 if is_bf16 else torch.float32}


def test_bf16_parameters_have_fp32_masters_unless_told_otherwise(ranks):
    ranks(2).run(each, masters, [(False,), (True,)])


def mixed_dtypes() -> None:
    """Buckets are of one dtype each, whichever parameter comes first."""
    net = build(torch.float32)
    net[0].to(BF16)
    optimizer = Bf16ZeroOptimizer(optim.AdamW([*net[0].parameters(), *net[2].parameters()]))
    x = inputs(0, 2, BF16)[world().rank()]
    net[2](torch.tanh(net[0](x)).float()).square().mean().backward()
    optimizer.step()
    assert {p.dtype for p in net[0].parameters()} == {BF16}
    assert {p.dtype for p in net[2].parameters()} == {torch.float32}
    whole = optimizer.state_dict()["state"]
    assert ["master" in whole[i] for i in range(4)] == [True, True, False, False]
    assert {value.dtype for one in whole.values() for value in one.values()} == {torch.float32}


def test_dtypes_may_mix(ranks):
    ranks(2).run(mixed_dtypes)


def after_a_failure(options: dict) -> None:
    """A backward that failed leaves nothing behind once gradients are dropped."""
    me, size = world().rank(), world().size()
    net, twin = build(), build()
    optimizer, reference = Bf16ZeroOptimizer(adamw(net), **options), adamw(twin)

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError

    train(net, optimizer, [inputs(0, size)[me]], 1)
    train(twin, reference, [inputs(0, size)], 1)
    with pytest.raises(ArithmeticError):
        net[2](Fail.apply(torch.tanh(net[0](inputs(1, size)[me])))).sum().backward()
    optimizer.zero_grad()
    train(net, optimizer, [inputs(2, size)[me]], 1)
    train(twin, reference, [inputs(2, size)], 1)
    torch.testing.assert_close(net[0].state_dict(), twin[0].state_dict(), rtol=0, atol=1e-12)


def test_a_failed_backward_is_forgotten(ranks):
    ranks(2).run(each, after_a_failure, [({},), ({"overlap_comm": True},), ({"stage": 1},)])


def checkpointed(options: dict) -> None:
    """Each reentrant checkpoint is a backward of its own, inside another."""
    me, size = world().rank(), world().size()
    net, twin = build(), build()
    optimizer, reference = Bf16ZeroOptimizer(adamw(net), **options), adamw(twin)

    def block(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.tanh(model[0](x)), x, use_reentrant=True)

    for step in range(STEPS):
        x = inputs(step, size).requires_grad_()
        for model, part in ((net, x[me]), (twin, x)):
            y = block(model, part)[..., :4].contiguous()
            checkpoint(model[2], block(model, y), use_reentrant=True).square().mean().backward()
        for o in (optimizer, reference):
            o.step()
            o.zero_grad()
    torch.testing.assert_close(net[0].state_dict(), twin[0].state_dict(), rtol=0, atol=1e-12)


def test_checkpoints_inside_a_backward(ranks):
    ranks(2).run(each, checkpointed, [({},), ({"overlap_comm": True},)])


def test_stage_3_needs_the_module():
    with pytest.raises(ValueError, match=facts_pattern("ZeroOptimizer", "stage 3")):
        Bf16ZeroOptimizer(adamw(build()), stage=3)


def all_freed() -> None:
    model = test_safety.net()
    bf16 = Bf16ZeroOptimizer(test_safety.adamw(model))
    test_safety.backward(model, test_safety.some(1)[0])
    bf16.step()
    bf16.finish()
    ended = weakref.ref(model), weakref.ref(bf16)
    del model, bf16
    gc.collect()
    assert [ref() for ref in ended] == [None, None]


def test_what_is_dropped_is_freed(ranks):
    ranks(2).run(all_freed)


def num_buckets() -> int:
    layers = (nn.Linear(1024, 1024, bias=False) for _ in range(test_bucket_plan_sizes.LAYERS))
    net = nn.Sequential(*layers)
    alone = Bf16ZeroOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
    found = len(alone.reducer.grad_buckets.buckets)
    alone.remove()
    return found


def by_transport() -> tuple[int, int]:
    with test_bucket_plan_sizes.queued_gloo():
        queued = num_buckets()
    return num_buckets(), queued


@pytest.mark.own_transport("sets the transport itself")
def test_buckets_have_the_sizes_of_the_transport(ranks):
    assert ranks(2).run(by_transport) == [(test_bucket_plan_sizes.LAYERS, 2)] * 2
