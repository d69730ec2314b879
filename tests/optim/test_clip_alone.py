"""What clipping counts where nobody gives layouts, and in which bits; torch's function is the
judge."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import collect, mark
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.parallel.tensor.linear import ColumnLinear, RowLinear
from torchdistpackage.parallel.tensor.norm import LayerNorm
from torchdistpackage.topology.mesh import topology

P = [1.0, 2.0, math.inf]


def with_grad(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    draw = torch.Generator().manual_seed(seed)
    found = nn.Parameter(torch.zeros(shape, dtype=dtype))
    found.grad = torch.randn(shape, dtype=torch.float64, generator=draw).to(dtype)
    return found


def norm_of(grads: list[torch.Tensor], p: float) -> float:
    return float(torch.cat([g.flatten() for g in grads]).norm(p))


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float16, torch.complex64, torch.float32])
def test_each_gradient_is_clipped_in_its_own_bits(first):
    """The factor was once rounded to the dtype of the first gradient."""
    own = [with_grad(50, seed=1, dtype=first), with_grad(50, seed=2, dtype=torch.float32)]
    own += [
        with_grad(50, seed=3),
        with_grad(2, 3, seed=4, dtype=first),
        with_grad(seed=5, dtype=first),
    ]
    wide = [p.grad.to(torch.promote_types(p.dtype, torch.float64), copy=True) for p in own]
    truth = math.sqrt(sum(float(g.abs().square().sum()) for g in wide))
    norm = float(clip_grad_norm_(own, 0.3))
    assert norm == pytest.approx(truth, rel=1e-6)
    for p, g in zip(own, wide, strict=True):
        close = {
            "rtol": 1.5 * torch.finfo(p.dtype).eps if p.dtype != torch.float64 else 1e-6,
            "atol": 1e-10,
        }
        torch.testing.assert_close(p.grad.to(g.dtype), g * (0.3 / (truth + 1e-6)), **close)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_norm_leaves_halves_something(dtype):
    """A norm beyond 65504 is no float16, nor is the factor that it gives."""
    large = nn.Parameter(torch.zeros(64, dtype=dtype))
    large.grad = torch.full((64,), 30000.0, dtype=dtype)
    wide = nn.Parameter(torch.zeros(1))
    wide.grad = torch.tensor([1e9])
    norm = float(clip_grad_norm_([large, wide], 1e3))
    assert norm == pytest.approx(math.hypot(30000.0 * 8, 1e9), rel=1e-2)
    assert float(large.grad[0]) == pytest.approx(3e-2, rel=1e-2)


@pytest.mark.parametrize("p", [0, -1.0, -math.inf, math.nan])
def test_what_is_no_norm_is_refused_by_name(p):
    own = with_grad(3, seed=0)
    before = own.grad.clone()
    with pytest.raises(ValueError, match="norm_type"):
        clip_grad_norm_(own, 1e-3, p)
    assert torch.equal(own.grad, before)


def without_tpc(p: float) -> None:
    """Replicas are not added up; what a group cuts is, over that group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = nn.Linear(3, 2).double()
    ddp = NaiveDDP(net)
    x = torch.arange(6.0 * size, dtype=torch.float64).view(size, 2, 3)
    ddp(x[rank]).square().mean().backward()
    truth = norm_of([q.grad for q in net.parameters()], p)
    assert float(clip_grad_norm_(net.parameters(), truth / 2, p)) == pytest.approx(truth, rel=1e-12)
    again = norm_of([q.grad for q in net.parameters()], p)
    assert again == pytest.approx(truth / 2, rel=1e-5)

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = pairs[rank // 2]
    net = nn.Sequential(ColumnLinear(4, 6, group=group), RowLinear(6, 4, group=group))
    for i, q in enumerate(net.parameters()):
        is_own = q is not net[1].bias
        q.grad = with_grad(*q.shape, seed=10 * i + (group.rank() + 1 if is_own else 0)).grad.float()
    whole = [net[1].bias.grad]
    for q in (net[0].weight, net[0].bias, net[1].weight):
        both = [torch.empty_like(q.grad) for _ in range(2)]
        dist.all_gather(both, q.grad, group=group)
        whole += both
    truth = norm_of(whole, p)
    assert float(clip_grad_norm_(net.parameters(), 1e9, p)) == pytest.approx(truth, rel=1e-5)
    # the other way round: a group is named, whose ranks hold stages of one model
    with_all = float(clip_grad_norm_(net.parameters(), 1e9, p, group=group))
    assert with_all == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("p", P)
def test_without_tpc_only_what_a_group_cuts_is_added_up(ranks, p):
    ranks(4).run(without_tpc, p)


def under_tpc(p: float) -> None:
    """Two stages of two tensor ranks: each element counts once, whoever holds it."""
    tpc.setup(topology([("pipe", 2), ("tensor", 2)], 4), dist.get_rank())
    stage, index = tpc.get_pp_rank(), tpc.get_tp_rank()
    net = nn.ModuleDict(
        {
            "column": ColumnLinear(4, 6),
            "norm": LayerNorm(4, sequence_parallel=True),
            "plain": nn.Linear(4, 3),
            "words": nn.Embedding(5, 4),
        }
    ).double()
    tied = Layout("words", (5, 4), stages=(0, 1))
    mark(net["words"], {"weight": tied})
    every: list[torch.Tensor] = []
    for i, (name, q) in enumerate(net.named_parameters()):
        cut, shared = name.startswith("column"), name.startswith("words")
        seeds = [
            100 * i + (0 if shared else 10 * s) + (t if cut else 0)
            for s in range(1 if shared else 2)
            for t in range(2 if cut else 1)
        ]
        every += [with_grad(*q.shape, seed=seed).grad for seed in seeds]
        own = 100 * i + (0 if shared else 10 * stage) + (index if cut else 0)
        q.grad = with_grad(*q.shape, seed=own).grad
    truth = norm_of(every, p)
    assert float(clip_grad_norm_(net.parameters(), 1e9, p)) == pytest.approx(truth, rel=1e-12)
    layouts = collect(net) | {"words.weight": tied}
    given = clip_grad_norm_(net.parameters(), truth / 3, p, layouts=list(layouts.values()))
    assert float(given) == pytest.approx(truth, rel=1e-12)
    assert float(clip_grad_norm_(net.parameters(), 1e9, p)) == pytest.approx(truth / 3, rel=1e-5)


@pytest.mark.parametrize("p", P)
def test_under_tpc_replicas_and_ties_count_once_and_stages_each(ranks, p):
    ranks(4).run(under_tpc, p)


def found_by_its_parameters(stage: int) -> None:
    """torch's way to call it, on parameters whose gradients have left for their owners."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    x = torch.randn(8, 5, dtype=torch.float64)
    net(x).square().mean().backward()
    truth = {q: norm_of([q.grad], 2) for q in net.parameters()}
    whole = math.hypot(*truth.values())
    net.zero_grad()
    zero = ZeroOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net, stage=stage)
    for given in (net.parameters(), [net[0].weight]):
        zero.zero_grad()
        net(x.chunk(2)[dist.get_rank()]).square().mean().backward()
        given = list(given)
        expected = whole if len(given) > 1 else truth[net[0].weight]
        norm = float(clip_grad_norm_(given, expected / 2))
        assert norm == pytest.approx(expected, rel=1e-9)
        assert float(clip_grad_norm_(given, 1e9)) == pytest.approx(expected / 2, rel=1e-4)
        assert float(clip_grad_norm_(zero, 1e9)) == pytest.approx(
            math.sqrt(whole**2 - expected**2 * 3 / 4), rel=1e-4
        )
    other = with_grad(3, seed=1)
    with pytest.raises(LayoutError, match="gradients of their own"):
        clip_grad_norm_([*net.parameters(), other], 1.0)
    with pytest.raises(LayoutError, match="is shared by ranks"):
        clip_grad_norm_(net.parameters(), 1.0, group=alone())
    zero.remove()
    net(x).square().mean().backward()
    assert float(clip_grad_norm_(net.parameters(), 1e9)) == pytest.approx(whole, rel=1e-9)


def alone() -> dist.ProcessGroup:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.full)])
def test_parameters_that_zero_shards_are_clipped_in_their_shards(ranks, stage):
    ranks(2).run(found_by_its_parameters, stage)
