"""Precision, losses and schedules of one's own in the loop around a pipeline."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.parallel.pipeline.whole_model import batch, chain, same, same_gradients, squares
from torchdistpackage import GradScaler, Pipeline
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.parallel.pipeline.microbatches import tensors_in
from torchdistpackage.schedule.actions import ActionKind
from torchdistpackage.schedule.costs import StageCosts
from torchdistpackage.schedule.generators import build


def mixed(schedule: str) -> None:
    """To the bit: the same microbatches, added up in the same order."""
    tpc.setup_process_groups([("pipe", 2)])
    truth = chain(2).float()
    optimizer = torch.optim.SGD(truth.parameters(), lr=0.1)
    stage = chain(2).float()[dist.get_rank()]
    mine = torch.optim.SGD(stage.parameters(), lr=0.1)
    scaler = GradScaler(init_scale=2.0**10)
    pipe = Pipeline(stage, loss=F.mse_loss, schedule=schedule, num_microbatches=4)
    for step in range(3):
        x, y = (z.float() for z in batch(8, seed=step))
        optimizer.zero_grad()
        mine.zero_grad()
        total = 0
        for a, b in zip(x.split(2), y.split(2), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(truth(a), b)
            (loss / 4).backward()
            total += loss.detach() / 4
        optimizer.step()
        with torch.autocast("cpu", torch.bfloat16):
            told = pipe.step(x, targets=y, loss_scale=scaler.get_scale())
        scaler.step(mine)
        scaler.update()
        torch.testing.assert_close(told, total, rtol=1e-6, atol=0)
    for a, b in zip(stage.parameters(), truth[dist.get_rank()].parameters(), strict=True):
        assert torch.equal(a, b)


def test_autocast_and_loss_scaling_are_those_of_one_process(ranks):
    ranks(2).run(mixed, "1f1b")


class Judge(nn.Module):
    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside = inside

    def forward(self, h, targets):
        return squares(self.inside(h), targets)


def own_loss() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    rank = dist.get_rank()
    x, y = batch(7)
    truth = chain(2)
    expected = squares(truth(x), y)
    expected.backward()
    stage = chain(2)[rank]
    pipe = Pipeline(Judge(stage) if rank else stage, num_microbatches=3)
    # each brings only what it needs
    loss = pipe.step(targets=y) if rank else pipe.step(x)
    same(loss, expected.detach())
    same_gradients({rank: stage}, truth)


def test_the_last_stage_may_return_the_loss(ranks):
    ranks(2).run(own_loss)


def synthesized(check: bool) -> None:
    tpc.setup_process_groups([("pipe", 2)])
    costs = StageCosts.of({ActionKind.F: 1.0, ActionKind.I: 1.4, ActionKind.W: 0.6}, 4)
    placement = build("interleaved", 2, 3).placement
    truth = chain(4)
    x, y = batch(6)
    squares(truth(x), y).backward()
    mine = {s: stage for s, stage in enumerate(chain(4)) if placement[s] == dist.get_rank()}
    pipe = Pipeline(
        mine, loss=squares, schedule="auto", costs=costs, chunks=2, num_microbatches=3, check=check
    )
    assert pipe.schedule.name.startswith("auto") and pipe.stages == tuple(mine)
    pipe.step(x, targets=y)
    same_gradients(mine, truth)


@pytest.mark.late_in_full
def test_the_schedule_may_be_made_from_costs(ranks):
    ranks(2).run(synthesized, True)
    ranks(2).run(synthesized, False)


def losses_of_two_dtypes() -> None:
    """Such as those of an evaluation under autocast and of a step outside it."""
    tpc.setup_process_groups([("pipe", dist.get_world_size())])
    exact = 1 + 2**-20  # no bfloat16
    pipe = Pipeline(
        nn.Linear(1, 1), num_microbatches=1, loss=lambda h, y: (h.sum() * 0 + y.sum()).to(y.dtype)
    )
    ones = torch.ones(1, 1)
    first = pipe.eval_step(ones, targets=ones.bfloat16())
    assert first.dtype == torch.float32 and first == 1
    assert pipe.eval_step(ones, targets=ones * exact) == exact
    later = pipe.eval_step(ones, targets=ones.bfloat16() * 2)
    assert later.dtype == torch.float32 and later == 2


def test_a_first_loss_of_low_precision_does_not_round_later_ones(ranks):
    ranks(1).run(losses_of_two_dtypes)
    ranks(2).run(losses_of_two_dtypes)


class Tabled(nn.Module):
    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside = inside

    def forward(self, h, table):
        return self.inside(h) * table.sum()


def whole_inputs_alone(table: torch.Tensor) -> None:
    tpc.setup_process_groups([("pipe", 2)])
    rank = dist.get_rank()
    x, y = batch(7)
    truth, mine = chain(2), chain(2)
    expected = squares(truth[1](truth[0](x)) * table.sum(), y)
    expected.backward()
    stage = Tabled(mine[1]) if rank else mine[0]
    pipe = Pipeline(stage, loss=squares, num_microbatches=3, whole=["table"])
    same(pipe.step(x, targets=y, table=table), expected.detach())
    same_gradients({rank: mine[rank]}, truth)


def test_a_stage_may_have_no_inputs_of_its_own_but_whole_ones(ranks):
    ranks(2).run(whole_inputs_alone, torch.rand(3).double())


class Telltale(nn.Module):
    """Gives, beside its output, a mean, a number that is no tensor, and what no graph leads to."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside = inside

    def forward(self, h):
        h = self.inside(h)
        return h, h.mean(), len(h), {"twice": [h * 2]}


def outputs_of_many_members() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    rank = dist.get_rank()
    x, y = batch(7)
    truth, stage = chain(2)(x).detach(), chain(2)[rank]
    pipe = Pipeline(
        Telltale(stage) if rank else stage,
        loss=lambda output, targets: squares(output[0], targets),
        num_microbatches=3,
    )
    wanted = (truth, truth.mean(), [3, 2, 2], {"twice": (truth * 2,)})
    pipe.step(x, targets=y, keep_outputs=True)
    if rank:
        assert not any(member.requires_grad for member in tensors_in(pipe.outputs))
        torch.testing.assert_close(pipe.outputs, wanted, rtol=0, atol=1e-12)


def test_kept_outputs_have_no_graph_and_means_in_them_are_over_samples(ranks):
    ranks(2).run(outputs_of_many_members)


def evaluations_of_many_sizes() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    stage, truth = chain(2)[dist.get_rank()], chain(2)
    pipe = Pipeline(stage, loss=squares, num_microbatches=2)
    for num_samples in (7, 4, 5):
        x, y = batch(num_samples, seed=num_samples)
        told = pipe.eval_step(x, targets=y, keep_outputs=True)
        same(told, squares(truth(x), y).detach())
        if dist.get_rank():
            same(pipe.outputs, truth(x).detach())
    pipe.eval_step(x, targets=y)
    assert pipe.outputs is None


def test_an_evaluation_may_change_shapes_and_keeps_outputs_when_asked_for(ranks):
    ranks(2).run(evaluations_of_many_sizes)


def held_twice() -> None:
    """Of two replicas, each with batches of its own."""
    tpc.setup_process_groups([("data", 2), ("pipe", 1)])
    rank = dist.get_rank()
    stage, alone, all_of_them = chain(1), chain(1), chain(1)
    pipe = Pipeline(NaiveDDP(stage), loss=squares, num_microbatches=2)

    def step(number: int) -> None:
        batches = [batch(4, seed=10 * replica + number) for replica in range(2)]
        x, y = batches[rank]
        squares(alone(x), y).backward()
        for a, b in batches:
            (squares(all_of_them(a), b) / 2).backward()
        pipe.step(x, targets=y)

    with pipe.no_sync():
        with pipe.no_sync():
            step(0)
        step(1)
    same_gradients(dict(enumerate(stage)), alone)
    step(2)
    same_gradients(dict(enumerate(stage)), all_of_them)


def test_no_sync_inside_no_sync_ends_with_the_outer_one(ranks):
    ranks(2).run(held_twice)
