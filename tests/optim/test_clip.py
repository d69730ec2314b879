"""One norm on every rank, that of one process, for every layout and p; clipped gradients too."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.train import parity
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.topology.views import topology

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


@pytest.mark.parametrize(
    "degrees",
    [pytest.param(d, marks=[] if d in SMALL_SET else pytest.mark.full) for d in LAYOUTS],
    ids=str,
)
def test_norms_and_clipped_gradients_are_those_of_one_process(ranks, degrees):
    extra = [f"parallel.{axis}={size}" for axis, size in degrees.items()]
    if "tensor" in degrees:
        extra.append("parallel.sequence_parallel=true")
    for p in (1.0, 2.0, math.inf):
        truth, grads = ranks(1).run(one_process, p)[0]
        results = ranks(math.prod(degrees.values())).run(clipped, extra, p, truth / 3)
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


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_an_empty_stage_counts_as_zero_and_a_bad_gradient_is_seen_by_all(ranks, p):
    ranks(3).run(with_an_empty_stage, p)
