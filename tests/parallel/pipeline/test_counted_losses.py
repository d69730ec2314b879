"""Losses of (sum, count): masked targets, beside one process, whatever the microbatches."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parallel.pipeline.whole_model import DIM, chain, same, same_gradients
from tests.tells import facts_pattern
from torchdistpackage import NaiveDDP, Pipeline, ZeroOptimizer
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError

M = -100
TARGETS = [M, M, 1, 2, M, 0, 3, M, 1, 2, 3, 0]
"""In three microbatches the first of a replica has none that count, if a replica has six."""


def counted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output, targets, reduction="sum", ignore_index=M)
    return total, (targets != M).sum()


def masked(first: int, last: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(len(TARGETS), DIM, dtype=torch.float64, generator=draw)
    return x[first:last], torch.tensor(TARGETS)[first:last]


def every_number_of_microbatches(schedule: str) -> None:
    tpc.setup_process_groups([("pipe", 2)])
    rank = tpc.get_pp_rank()
    x, y = masked(0, 6)
    truth = chain(2)
    expected = F.cross_entropy(truth(x), y)
    expected.backward()
    for number in (1, 2, 3):
        stage = chain(2)[rank]
        pipe = Pipeline(stage, loss=counted, schedule=schedule, num_microbatches=number)
        for _ in range(2):
            stage.zero_grad()
            same(pipe.step(x, targets=y), expected.detach())
            same_gradients({rank: stage}, truth)
        same(pipe.eval_step(x, targets=y, num_microbatches=4), expected.detach())
        # another step adds to what is there, with a factor of its own
        pipe.step(x, targets=y, loss_scale=torch.tensor(0.5, dtype=torch.float64))
        for mine, whole in zip(stage.parameters(), truth[rank].parameters(), strict=True):
            same(mine.grad, 1.5 * whole.grad)
        stage.zero_grad()
        assert pipe.step(x, targets=torch.full_like(y, M)) == 0
        assert all(not p.grad.any() for p in stage.parameters())


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.full)])
def test_masked_targets_do_not_depend_on_the_microbatches(ranks, schedule):
    ranks(2).run(every_number_of_microbatches, schedule)


def replicas_of_unequal_counts(wrapper: str, number: int) -> None:
    """One process has the mean over all targets that count in both replicas."""
    tpc.setup_process_groups([("data", 2), ("pipe", 2)])
    rank, data = tpc.get_pp_rank(), tpc.get_dp_rank()
    truth = chain(2)
    x, y = masked(0, 12)
    expected = F.cross_entropy(truth(x), y)
    expected.backward()
    stage = chain(2)[rank]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    mine: nn.Module = stage
    reducer = of_pipe = None
    if wrapper == "ddp":
        mine = NaiveDDP(stage)
    else:
        kind, _, given = wrapper.partition("-")
        optimizer = reducer = ZeroOptimizer(optimizer, stage, stage=int(kind[-1]))
        of_pipe = reducer.reducer if given else reducer
    pipe = Pipeline(mine, loss=counted, num_microbatches=number, reducer=of_pipe)
    x, y = masked(6 * data, 6 * data + 6)
    before = {n: p.detach().clone() for n, p in stage.named_parameters()}
    for step in range(3):
        optimizer.zero_grad()
        if step == 2:  # in two halves, of which only the second is summed
            with pipe.no_sync():
                pipe.step(x, targets=y, loss_scale=0.25)
            told = pipe.step(x, targets=y, loss_scale=0.75)
        else:
            told = pipe.step(x, targets=y)
        same(told, expected.detach())
        if reducer is None:
            same_gradients({rank: stage}, truth)
    if reducer is not None:
        reducer.step()
        reducer.finish()
        for (n, p), whole in zip(stage.named_parameters(), truth[rank].parameters(), strict=True):
            same(p.detach(), before[n] - 0.1 * whole.grad)


@pytest.mark.parametrize(
    ("wrapper", "number"),
    [
        ("ddp", 3),
        ("zero2", 3),
        ("zero2-reducer", 3),  # the reducer alone knows where reduced gradients are
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("zero1", 3), ("ddp", 1), ("zero1", 1), ("zero2", 1))
        ),
    ],
)
def test_counts_are_summed_over_replicas(ranks, wrapper, number):
    ranks(4).run(replicas_of_unequal_counts, wrapper, number)


def refused() -> None:
    tpc.setup_process_groups([("pipe", 1)])
    x, y = masked(0, 6)
    kinds = [counted, lambda o, t: counted(o, t)[0]]
    pipe = Pipeline(chain(1), loss=lambda o, t: kinds.pop(0)(o, t), num_microbatches=1)
    pipe.step(x, targets=y)
    with pytest.raises(CommError, match="is one number, but was"):
        pipe.step(x, targets=y)
    with pytest.raises(CommError, match="stage 0 is a function"):
        Pipeline(chain(1).forward, loss=counted, num_microbatches=2).step(x, targets=y)
    with pytest.raises(CommError, match=facts_pattern("microbatch 0", "100")):
        Pipeline(chain(1), loss=F.cross_entropy, num_microbatches=3).step(x, targets=y)
    nothing = lambda o, t: o.sum() * float("nan")  # noqa: E731
    assert Pipeline(chain(1), loss=nothing, num_microbatches=2).step(x, targets=y).isnan()
    with pytest.raises(CommError, match="the count of microbatch 0 requires a gradient"):
        Pipeline(chain(1), loss=lambda o, t: (o.sum(), o.mean()), num_microbatches=2).step(
            x, targets=y
        )
    for value in (lambda o, t: o[:, :1], lambda o, t: (o, o), lambda o, t: o.sum().reshape(1)):
        with pytest.raises(CommError, match="not one number; return the mean"):
            Pipeline(chain(1), loss=value, num_microbatches=6).step(x, targets=y)


def test_what_is_no_loss_is_refused_by_name(pool):
    pool(1).run(refused)


def heads_of_one_number() -> None:
    """One sample a microbatch, and one number a sample."""
    tpc.setup_process_groups([("pipe", dist.get_world_size())])
    rank = dist.get_rank()
    truth = nn.Sequential(chain(2), nn.Linear(DIM, 1).double())
    stages = [truth[0][0], nn.Sequential(truth[0][1], truth[1])]
    pipe = Pipeline(stages[rank], loss=F.mse_loss, num_microbatches=4)
    for num in (4, 5, 7):
        x = torch.randn(num, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(num))
        expected = truth(x).detach()
        for number in (1, 2, 3, 4):
            found = pipe.predict(x, num_microbatches=number)
            loss = pipe.eval_step(
                x, targets=expected * 2, num_microbatches=number, keep_outputs=True
            )
            same(loss, expected.square().mean())
            if rank == 1:
                same(found, expected)
                same(pipe.outputs, expected)


@pytest.mark.late_in_full
def test_numbers_of_samples_are_joined_and_not_averaged(ranks):
    ranks(2).run(heads_of_one_number)
