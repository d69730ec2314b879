"""Steady steps of a pipeline where calls are queued, as on NCCL: what the host waits for."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.host_reads import HostReads
from tests.parallel.pipeline.whole_model import batch, chain, same, same_gradients, squares
from torchdistpackage import NaiveDDP, Pipeline
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.comm.work import Work
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.parallel.pipeline.program import RankProgram

STEADY = range(3, 6)


def of_pipeline(schedule: str, data: int, loss_scale: bool) -> dict[str, int]:
    """What is read in the steady steps of a loop around a Pipeline, with a norm and an update."""
    tpc.setup_process_groups([("data", data), ("pipe", 2)])
    index, found = tpc.get_pp_rank(), HostReads()
    chunks = {"interleaved": (index, index + 2), "zb-v": (index, 3 - index)}.get(schedule, (index,))
    stages: nn.ModuleDict | NaiveDDP = nn.ModuleDict({str(s): chain(4)[s] for s in chunks})
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.01)
    mine = {s: stages[str(s)] for s in chunks}
    if data > 1:
        mine = {s: NaiveDDP(stage) for s, stage in mine.items()}
    pipe = Pipeline(mine, loss=squares, schedule=schedule, num_microbatches=4)
    scale = torch.tensor(2.0, dtype=torch.float64) if loss_scale else 1.0
    for step in range(STEADY.stop):
        x, y = batch(8, seed=step)
        optimizer.zero_grad()
        if step == STEADY.start:
            found.__enter__()
        pipe.step(x, targets=y, loss_scale=scale)
        clip_grad_norm_(stages.parameters(), 1.0, group=tpc.get_group("pipe"))
        optimizer.step()
    found.__exit__(None, None, None)
    return dict(found.found)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("schedule", "data", "loss_scale"),
    [
        *((schedule, 1, False) for schedule in ("gpipe", "1f1b", "zb-h1", "interleaved", "zb-v")),
        *((schedule, 2, True) for schedule in ("1f1b", "zb-h1")),
    ],
)
def test_a_steady_step_of_a_pipeline_reads_nothing(pool, schedule, data, loss_scale):
    found = pool(2 * data).run(of_pipeline, schedule, data, loss_scale, transport="late")
    assert found == [{}] * 2 * data


def sends_of_a_step() -> tuple[int, list[str], bool]:
    """(batches that send, what was waited for in them before the end of the step, whether any of
    them kept what it had sent) of the first stage, whose warm-up only sends."""
    tpc.setup_process_groups([("pipe", 4)])
    rank = dist.get_rank()
    stage, truth = chain(4)[rank], chain(4)
    pipe = Pipeline(stage, loss=squares, num_microbatches=6)
    x, y = batch(6)
    pipe.step(x, targets=y)
    stage.zero_grad()
    sent: dict[Work, bool] = {}
    early: list[str] = []
    kept = [False]
    exchange, wait, end = RankProgram._exchange, Work.wait, RankProgram.end

    def noting(steps: RankProgram, index: int) -> None:
        exchange(steps, index)
        messages = steps._batches[index]
        if any(a.kind.is_send for a in messages):
            flight, _ = steps._sends._works[-1]
            sent[flight] = all(a.kind.is_send for a in messages)
            kept[0] |= flight._keep is not None

    def waiting(flight: Work) -> torch.Tensor:
        # one that receives as well is waited for where what it brings is needed
        early.extend([str(recorder.action)] * sent.get(flight, False))
        return wait(flight)

    def ending(steps: RankProgram) -> None:
        patch.setattr(Work, "wait", wait)
        end(steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankProgram, "_exchange", noting)
        patch.setattr(RankProgram, "end", ending)
        patch.setattr(Work, "wait", waiting)
        loss = pipe.step(x, targets=y)
    expected = squares(truth(x), y)
    expected.backward()
    same(loss, expected.detach())
    same_gradients({rank: stage}, truth)
    assert not any(flight._works for flight in sent), "each is waited for in the end"
    return sum(sent.values()), early, kept[0]


def test_a_queue_that_computes_waits_for_no_send_before_the_end(pool):
    found = pool(4).run(sends_of_a_step, transport="late")
    assert [early for _, early, _ in found] == [[]] * 4
    assert not any(kept for _, _, kept in found), "the queue keeps what was sent, not the flight"
    assert found[0][0] >= 3, "a warm-up of more sends than the host would keep"


class Copies(TorchDispatchMode):
    """Counts copies of one dtype or device into another."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func._schema.name == "aten::_to_copy"
        return func(*args, **(kwargs or {}))


def copies_of_the_scale() -> int:
    tpc.setup_process_groups([("pipe", 1)])
    stage, truth = chain(1).float(), chain(1).float()
    x, y = (z.float() for z in batch(8))
    pipe = Pipeline(stage, loss=squares, num_microbatches=4)
    scale = torch.tensor([8.0], dtype=torch.float64)
    pipe.step(x, targets=y, loss_scale=scale)
    stage.zero_grad()
    with Copies() as copies:
        pipe.step(x, targets=y, loss_scale=scale)
    (8 * squares(truth(x), y)).backward()
    for mine, whole in zip(stage.parameters(), truth.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, whole.grad)
    return copies.num


def test_a_loss_scale_on_the_host_is_copied_for_no_microbatch(pool):
    """In a dtype of its own, so that a copy here is what one from the host is on a device."""
    assert pool(1).run(copies_of_the_scale) == [0]
