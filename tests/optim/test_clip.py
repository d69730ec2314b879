"""One norm on every rank, that of one process, for every layout and p; clipped gradients too."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.each import each
from tests.train import parity
from torchdistpackage.comm import primitives
from torchdistpackage.comm.tpc import setup_node_groups, tpc
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.ddp.zero.options import replica_group
from torchdistpackage.layout.layout import Layout
from torchdistpackage.layout.mark import mark
from torchdistpackage.models.gpt import GPT
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.parallel.tensor.init import initialize
from torchdistpackage.topology.mesh import topology

BASE = [
    "model.layers=2", "model.dim=16", "model.heads=4", "model.vocab=257", "data.seq_len=8",
    "data.global_batch=8", "pipeline.microbatches=2", "precision.dtype=float64", "optim.clip=0",
    "data.target=tests.train.sources:UnevenTokens", "data.args={seq_len: 8, vocab: 257}",
]  # fmt: skip
LAYOUTS = [
    {"data": 4}, {"pipe": 4}, {"tensor": 4}, {"data": 2, "pipe": 2}, {"pipe": 2, "tensor": 2},
    {"data": 2, "tensor": 2}, {"data": 2, "pipe": 2, "tensor": 2},
]  # fmt: skip


def clipped(extra: list[str], p: float, limit: float) -> tuple[float, parity.Held]:
    run = parity.trainer([*BASE, *extra])
    run.train_step(1)
    names = dict(run.stage.named_parameters())
    norm = clip_grad_norm_(names.values(), limit, p, layouts=[run.layouts[n] for n in names])
    return float(norm), parity.held(run, "grad")


SMALL_SET = ({"data": 4}, {"pipe": 4}, {"data": 2, "pipe": 2, "tensor": 2})


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "degrees",
    [pytest.param(d, marks=[] if d in SMALL_SET else pytest.mark.full) for d in LAYOUTS],
    ids=str,
)
def test_norms_and_clipped_gradients_are_those_of_one_process(ranks, degrees):
    extra = [f"parallel.{axis}={size}" for axis, size in degrees.items()]
    if "tensor" in degrees:
        extra.append("parallel.sequence_parallel=true")
    norms = (1.0, 2.0, math.inf)
    (truths,) = ranks(1).run(each, one_process, [(p,) for p in norms])
    limits = [(extra, p, truth / 3) for p, (truth, _) in zip(norms, truths, strict=True)]
    of_ranks = ranks(math.prod(degrees.values())).run(each, clipped, limits)
    for (truth, grads), results in zip(truths, zip(*of_ranks, strict=True), strict=True):
        assert [norm for norm, _ in results] == pytest.approx([truth] * len(results), rel=1e-9)
        mine = parity.whole(held for _, held in results)
        for name, grad in grads.items():
            torch.testing.assert_close(
                mine[name], grad, rtol=0, atol=1e-9 * float(grad.abs().max())
            )


def one_process(p: float) -> tuple[float, dict[str, torch.Tensor]]:
    """torch's own function on the whole model."""
    run = parity.trainer(BASE)
    run.train_step(1)
    limit = float(torch.nn.utils.get_total_norm([q.grad for q in run.stage.parameters()], p)) / 3
    norm = float(nn.utils.clip_grad_norm_(run.stage.parameters(), limit, p))
    return norm, parity.whole([parity.held(run, "grad")])


def with_an_empty_stage(p: float) -> None:
    """A rank without parameters takes part, and a bad gradient is told to all."""
    tpc.setup(topology([("pipe", 3)], 3), dist.get_rank())
    rank = dist.get_rank()
    own = [] if rank == 1 else [nn.Parameter(torch.zeros(3))]
    for q in own:
        q.grad = torch.tensor([1.0, -2.0, 2.0]) * (rank + 1)
    every = torch.tensor([1.0, -2.0, 2.0, 3.0, -6.0, 6.0])
    norm = clip_grad_norm_(own, 0.5, p)
    assert float(norm) == pytest.approx(float(every.norm(p)), rel=1e-6)
    for q in own:
        expected = torch.tensor([1.0, -2.0, 2.0]) * (rank + 1) * 0.5 / every.norm(p)
        torch.testing.assert_close(q.grad, expected, rtol=1e-4, atol=0)
        q.grad[0] = math.nan if rank == 2 else 0.0
    with pytest.raises(RuntimeError, match=r"norm of the gradients of all stages is (nan|inf)"):
        clip_grad_norm_(own, 0.5, p, error_if_nonfinite=True)


def test_an_empty_stage_counts_as_zero_and_a_bad_gradient_is_seen_by_all(ranks):
    ranks(3).run(each, with_an_empty_stage, [(1.0,), (2.0,), (math.inf,)])


def sent_by_each_stage() -> list[tuple[str, torch.dtype]]:
    """The group's tensors live elsewhere than the CPU, as over NCCL; the middle stage is empty."""
    tpc.setup(topology([("pipe", 3)], 3), dist.get_rank())
    own = [] if dist.get_rank() == 1 else [nn.Parameter(torch.ones(3))]
    for q in own:
        q.grad = torch.ones(3)
    sent: list[tuple[str, torch.dtype]] = []

    def all_reduce(x: torch.Tensor, group: object, op: object = None) -> torch.Tensor:
        sent.append((x.device.type, x.dtype))
        return torch.ones(())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(primitives, "device_of", lambda group: torch.device("meta"))
        patch.setattr(primitives, "all_reduce", all_reduce)
        for p in (2.0, math.inf):
            clip_grad_norm_(own, 0.5, p)
    return sent


def test_an_empty_stage_sends_what_the_others_send(ranks):
    assert ranks(3).run(sent_by_each_stage) == [[("meta", torch.float32)] * 2] * 3


def net_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def expect_shards(zero: ZeroOptimizer, grads: dict[str, torch.Tensor], factor: float) -> None:
    for shard in zero.shards:
        expected = grads[shard.name].flatten()[shard.start : shard.stop] * factor
        torch.testing.assert_close(shard.tensor.grad.flatten(), expected, rtol=1e-12, atol=0)


def halved(name: str, half: torch.Tensor) -> Layout:
    """Of a parameter of which each of two tensor ranks has half the rows."""
    rows, *others = half.shape
    return Layout(name, (2 * rows, *others), (("tensor",), *((),) * len(others)))


def of_shards(kind: str, stage: int) -> None:
    """Whole replicas in one group, in nodes that are replicas, or under two tensor ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups, parts, index = {}, 1, rank
    if kind == "nodes":
        node = setup_node_groups(2)
        groups = {"group": node, "replicas": replica_group(node)}
    if kind == "tensor":
        tpc.setup_process_groups([("data", size // 2), ("tensor", 2)])
        parts, index = 2, tpc.get_dp_rank()
    nets = [net_of(seed) for seed in range(parts)]
    for net in nets:
        net(batch()).square().mean().backward()
    every = [p.grad for net in nets for p in net.parameters()]
    mine = 0 if parts == 1 else tpc.get_tp_rank()
    grads = {n: p.grad for n, p in nets[mine].named_parameters()}
    for p in (1.0, 2.0, math.inf):
        net = net_of(mine)
        if kind == "tensor":
            mark(net, {n: halved(n, q) for n, q in net.named_parameters()})
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        zero = ZeroOptimizer(optimizer, net, stage=stage, **groups)
        net(batch().chunk(size // parts)[index]).square().mean().backward()
        truth = float(torch.nn.utils.get_total_norm(every, p))
        norm = clip_grad_norm_(zero, truth / 3, p)
        assert float(norm) == pytest.approx(truth, rel=1e-9)
        expect_shards(zero, grads, truth / 3 / (truth + 1e-6))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("kind", "stage"),
    [
        ("nodes", 1),
        ("one group", 2),
        ("tensor", 1),
        pytest.param("one group", 1, marks=pytest.mark.full),
        pytest.param("nodes", 3, marks=pytest.mark.full),
        pytest.param("tensor", 3, marks=pytest.mark.full),
    ],
)
def test_shards_count_once_and_are_clipped(ranks, kind, stage):
    ranks(4).run(of_shards, kind, stage)


def of_a_layout(
    data: int, tensor: int, sequence: bool, p: float, clip: float
) -> tuple[float, float]:
    """Norm of a GPT whose layouts say what is split, partial, replicated; the norm once clipped."""
    tpc.setup_process_groups([("data", data), ("tensor", tensor)])
    shape = GPTShape(2, 8, 2, 17, 6, sequence_parallel=sequence)
    model = GPT(shape, dtype=torch.float64)
    initialize(model, model.layouts(), tpc.topology.dense, dist.get_rank(), 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    zero = ZeroOptimizer(optimizer, model, layouts=model.layouts())
    ids = torch.randint(17, (4, 7), generator=torch.Generator().manual_seed(0))
    mine = ids.chunk(data)[tpc.get_dp_rank()]
    total, count = model.loss(model(mine[:, :-1]), mine[:, 1:])
    (total / count).backward()
    norm = float(clip_grad_norm_(zero, clip, p))
    again = float(clip_grad_norm_(zero, clip * 2, p))
    return norm, again


@pytest.mark.full
def test_the_norm_of_shards_under_layouts_is_that_of_one_process(ranks):
    """Replicas, or two tensor ranks with and without sequence parallelism."""
    norms = (1.0, 2.0, math.inf)
    (alone,) = ranks(1).run(each, of_a_layout, [(1, 1, False, p, 1e9) for p in norms])
    degrees = [(4, 1, False), (2, 2, False), (2, 2, True)]
    truths = [(p, truth) for p, (truth, _) in zip(norms, alone, strict=True)]
    cases = [(*case, p, truth / 3) for case in degrees for p, truth in truths]
    expected = [(truth, truth / 3) for _ in degrees for _, truth in truths]
    for found in ranks(4).run(each, of_a_layout, cases):
        for case, (norm, again), (truth, limit) in zip(cases, found, expected, strict=True):
            assert norm == pytest.approx(truth, rel=1e-9), case
            assert again == pytest.approx(limit, rel=1e-5), case
