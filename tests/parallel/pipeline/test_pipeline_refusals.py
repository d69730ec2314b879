"""What does not fit is refused on every rank at once, with the numbers."""

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.parallel.pipeline.whole_model import batch, chain, same, squares
from tests.tells import facts_pattern
from torchdistpackage import Pipeline
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError, ScheduleError
from torchdistpackage.parallel.pipeline.agreement import StepAgreement
from torchdistpackage.schedule.generators import build


def made(rank: int, **options) -> Pipeline:
    settings = {"loss": squares, "num_microbatches": 4, "timeout_s": 20} | options
    return Pipeline(settings.pop("stages", chain(2)[rank]), **settings)


def unfitting_pipelines(folder: Path) -> None:
    costs, binary = folder / "costs.yaml", str(folder / "binary.csv")
    tpc.setup_process_groups([("pipe", 2)])
    rank, two = dist.get_rank(), list(chain(2))
    refused = [
        (
            {"schedule": "zb-v"},
            r"rank 0: was given 1 stages, but zb-v places 2 of 4 on it: \[0, 3\]",
        ),
        (
            {"stages": two if rank else two[0]},
            r"^pipe rank 1: was given 2 stages, but 1f1b places 1",
        ),
        ({"stages": {0: two[0]}}, r"^pipe rank 1: was given stages \[0\], but 1f1b places \[1\]"),
        ({"stages": 3}, "a stage is a int"),
        (
            {"schedule": "1f1c"},
            "^all pipe ranks: no schedule '1f1c'; .* dualpipe-v, auto, or a file FILE.csv$",
        ),
        ({"schedule": "1f1b" if rank else "1f1c"}, "^pipe rank 0: no schedule"),
        ({"num_microbatches": None}, "needs num_microbatches"),
        ({"num_microbatches": 4 + rank}, "of schedule: .* 4 microbatches .* 5 microbatches"),
        ({"dynamic_shapes": bool(rank)}, "of dynamic_shapes: by pipe rank False, True"),
        ({"skips": ["memory"]}, "no stage after the first has a parameter memory"),
        ({"schedule": build("1f1b", 3, 4)}, "1f1b has 3 pipe ranks, but 2 are"),
        ({"schedule": build("1f1b", 2, 3)}, "1f1b has 3 microbatches, but 4 are"),
        ({"schedule": "auto"}, "needs costs of each stage"),
        ({"schedule": "missing.csv"}, "missing.csv cannot be read: No such file"),
        ({"schedule": None if rank else "1f1b"}, "^pipe rank 1: schedule is None; give a name"),
        ({"schedule": binary if rank else "1f1b"}, "^pipe rank 1: .* cannot be read: 'utf-8'"),
        ({"schedule": str(folder / "pipe.csv")}, "^all pipe ranks: .* cannot be read: is a pipe"),
        ({"schedule": Path("/dev/zero")}, "^all pipe ranks: /dev/zero .* is a device"),
        ({"num_microbatches": "4"}, "^all pipe ranks: num_microbatches is '4'; give a whole"),
        ({"num_microbatches": 2.5 if rank else 4}, "^pipe rank 1: num_microbatches is 2.5"),
        ({"schedule": "auto", "chunks": 0, "costs": costs}, "chunks is 0; give a whole number"),
        ({"schedule": "auto", "costs": 3}, "costs are 3; give StageCosts, or the file"),
        ({"schedule": "auto", "costs": "none.yaml"}, "none.yaml cannot be read"),
        ({"skips": 3}, "skips is 3; give a list of names"),
        ({"loss": 0.5}, "loss is 0.5; give a function of output and targets, or None"),
        ({"skips": "memory"}, r"skips is 'memory'; give a list of names: \['memory'\]"),
    ]
    for options, text in refused:
        with pytest.raises(ScheduleError, match=text):
            made(rank, **options)
    with pytest.raises(ScheduleError, match="whole is 'table'; give a list of names"):
        made(rank, whole="table")
    with pytest.raises(ScheduleError, match=facts_pattern("rank 1", "'mse'")):
        made(rank, loss="mse" if rank else None)
    assert made(rank, schedule="auto", costs=costs).schedule.name.startswith("auto")


def test_stages_that_do_not_fit_the_schedule_are_refused(ranks, tmp_path):
    (tmp_path / "costs.yaml").write_text("forward: 1\nbackward: 2\n")
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xb3\xff,0F0\n")
    ranks(2).run(unfitting_pipelines, tmp_path)


def unfitting_batches() -> None:
    tpc.setup_process_groups([("pipe", 2)])
    rank = dist.get_rank()
    x, y = batch(8)
    pipe, returning = made(rank), made(rank, loss=None)
    alone = made(rank, loss=lambda output: output.mean())
    refused = [
        (lambda: pipe.step(x[:3], targets=y[:3]), "3 samples cannot fill 4 microbatches; use at m"),
        (lambda: pipe.step(x[rank:], targets=y[rank:]), r"by pipe rank they have \[8, 7\]"),
        (lambda: pipe.step(x, targets=y[1:]), "all pipe ranks: .* not arguments 8, targets 7"),
        (
            lambda: pipe.step(x, targets=y, mask=x),
            "all pipe ranks: no stage has a parameter mask; their parameters are",
        ),
        (
            lambda: (pipe.eval_step if rank else pipe.step)(x, targets=y),
            "they call step, eval_step",
        ),
        (lambda: pipe.eval_step(x, targets=y, num_microbatches=rank), "rank 0: 0 microbatches"),
        (lambda: pipe.predict(x, num_microbatches=1.5), "ranks: 1.5 microbatches; use a whole num"),
        (
            lambda: pipe.eval_step(x, targets=y, num_microbatches=1 + rank),
            "they call eval_step of 1 microbatches, eval_step of 2 microbatches",
        ),
        (lambda: pipe.step(x, y), r"rank 0: stage 0 takes 1 positional arguments \(\w+\), not 2 "),
        (lambda: pipe.step(targets=y), r"rank 0: stage 0 needs \w+ \(what the loss needs goes"),
        (lambda: pipe.step(x), "^pipe rank 1: the loss needs targets; it is called with output$"),
        (lambda: alone.step(x, targets=y), "rank 1: the loss takes 1 .*, not 2; it is called"),
        (lambda: returning.step(x, targets=y), "rank 1: nothing takes the targets: there is no"),
        (lambda: pipe.step(x[:0], targets=y[:0]), "^all pipe ranks: the batch has 0 samples"),
        (lambda: pipe.predict(*[x[:0]][rank:]), "^pipe rank 0: the batch has 0 samples; give 1"),
    ]
    for call, text in refused:
        with pytest.raises(CommError, match=text):
            call()
    with pytest.raises(ScheduleError, match="forward has no backwards, so a step would train noth"):
        made(rank, schedule="forward").step(x, targets=y)
    before = pipe.step(x, targets=y)  # nothing of it was begun
    with pytest.raises(CommError, match=facts_pattern("stage 0", "1 samples", "microbatch 2", "2")):
        pipe.step(x[:6], targets=y[:6])
    with pytest.raises(CommError, match=facts_pattern("rank 0", "stage 0", "1 pos")):
        pipe.step(x, y)  # rank 1 hears of it when it is ready to send
    same(pipe.step(x, targets=y), before)


def test_batches_that_do_not_fit_are_refused_and_leave_the_pipeline_usable(ranks):
    ranks(2).run(unfitting_batches)


def no_number() -> None:
    tpc.setup_process_groups([("pipe", 1)])
    x, y = batch(4)
    with pytest.raises(CommError, match=r"the loss of microbatch 0 is .*\[1, 4\].* not one"):
        Pipeline(chain(1)[0], num_microbatches=4).step(x)
    pipe = Pipeline(chain(1)[0], num_microbatches=4, loss=lambda output, targets: None)
    with pytest.raises(CommError, match="the loss of microbatch 0 is None"):
        pipe.step(x, targets=y)


def test_a_loss_that_is_no_number_is_refused(ranks):
    ranks(1).run(no_number)


def unchecked() -> None:
    """What a rank can see for itself it still refuses."""
    tpc.setup_process_groups([("pipe", 1)])
    x, y = batch(8)
    pipe = made(0, stages=chain(1)[0], check=False)
    with pytest.raises(CommError, match="not arguments 8, targets 7"):
        pipe.step(x, targets=y[1:])
    with pytest.raises(CommError, match="the loss needs targets"):
        pipe.step(x)


def test_without_the_check_a_rank_refuses_its_own_mistakes(ranks):
    ranks(1).run(unchecked)


def changed_length() -> None:
    """At the sender, before anything is sent. What the other rank is ready for is never sent."""
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    grow = lambda x: x.repeat(1, int(x[0, 0])) * torch.ones((), requires_grad=True)  # noqa: E731
    stages = [grow, lambda h: h.mean()]
    pipe = Pipeline(stages[rank], num_microbatches=2, timeout_s=2, group=pair)
    pipe.step(torch.ones(4, 3))
    if rank == 0:
        with pytest.raises(
            CommError, match=r"stage 0 sends .*\[2, 6\].* for microbatch 1, .*\[2, 3\]"
        ):
            pipe.step(torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None].expand(-1, 3))
    else:  # which waits for nothing, as nothing was sent
        StepAgreement(pair, "step", 4).settle()


def test_a_changed_length_is_refused_at_the_sender(ranks):
    ranks(2).run(changed_length)


class Failing(torch.nn.Module):
    """A stage that raises in the second microbatch while `fails`."""

    def __init__(self, stage: torch.nn.Module):
        super().__init__()
        self.stage, self.fails, self.calls = stage, False, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.fails and self.calls == 2:
            raise ValueError("no such sample")
        return self.stage(x)


def after_an_exception() -> None:
    """One rank fails in a step or an evaluation, or alone in the loss of the last microbatch, when
    the other one waits for that; next calls are refused on both at once."""
    groups, rank, (x, y) = Groups(dist.get_rank()), dist.get_rank(), batch(8)

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if fails_in_loss and not targets[-1].ne(y[-1]).any():
            raise ValueError("no such target")
        return squares(output, targets)

    cases = [(1, 2, True, False), (0, 2, False, False), (1, 0, True, False), (1, 1, True, True)]
    for who, good, check, evaluates in cases:
        group = groups.of(range(2), use=f"fails {who} {good} {check}")
        stage, fails_in_loss = Failing(chain(2)[rank]), False
        pipe = made(rank, stages=stage, loss=loss, group=group, check=check)
        for _ in range(good):
            pipe.step(x, targets=y)
        pipe.executor.timeout_s = 0.5
        pipe._loss_broadcast._channel.limit(0.5)
        fails_in_loss = evaluates
        stage.fails, stage.calls = not evaluates and rank == who, 0
        with pytest.raises(ValueError if rank == who else CommError):
            (pipe.eval_step if evaluates else pipe.step)(x, targets=y)
        fails_in_loss = stage.fails = False
        begun = time.monotonic()
        for call in (
            lambda of=pipe: of.step(x, targets=y),
            lambda of=pipe: of.eval_step(x, targets=y),
            lambda of=pipe: of.predict(x),
            lambda over=group: made(rank, group=over),
        ):
            with pytest.raises(CommError, match=r"interrupted by \w+Error: .* make a new group"):
                call()
        assert time.monotonic() - begun < 10


@pytest.mark.own_transport("a message of gloo has a limit of its own")
def test_after_an_exception_the_group_is_refused_at_once(ranks):
    ranks(2).run(after_an_exception)


def thawed_late() -> None:
    """What was frozen in the first step: nobody waits for a gradient, and nobody sends one."""
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    stage = chain(2)[rank].requires_grad_(rank == 1)
    pipe = Pipeline(
        stage, loss=lambda out, y: (out - y).square().mean(), num_microbatches=2, timeout_s=2,
        group=pair, check=False,
    )  # fmt: skip
    x, y = batch(4)
    pipe.step(x, targets=y)
    if rank == 0:
        stage.requires_grad_()
        with pytest.raises(CommError, match=r"\] requires_grad for microbatch 0, but .*\] in the"):
            pipe.step(x, targets=y)


def test_a_stage_that_was_frozen_in_the_first_step_is_not_thawed_unsaid(ranks):
    ranks(2).run(thawed_late)
