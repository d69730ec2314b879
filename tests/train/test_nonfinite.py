"""One number on one rank that is not finite: all ranks do the same, and all say where it was."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.tells import tells
from tests.train import metrics_page, parity
from torchdistpackage.ddp.sharded import ShardedOptimizer
from torchdistpackage.errors import NonFiniteError
from torchdistpackage.train.build import make_loop
from torchdistpackage.train.nonfinite import explain
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.train_state import TrainState

BASE = [
    "model.layers=2", "model.dim=8", "model.heads=2", "model.vocab=32", "data.seq_len=8",
    "data.args={seq_len: 8, vocab: 32}", "data.target=tests.train.sources:UnevenTokens",
    "data.global_batch=8", "pipeline.microbatches=2", "train.steps=4", "optim.warmup_steps=0",
    "model.dropout=0.1", "train.eval_batches=1", "train.generate_tokens=0",
]  # fmt: skip
LAYOUTS = {
    "data2": (2, ["parallel.data=2"]),
    "pipe2": (2, ["parallel.pipe=2", "parallel.data=1"]),
    "tensor2": (2, ["parallel.tensor=2", "parallel.data=1"]),
    "zero1": (2, ["parallel.data=2", "parallel.zero=1"]),
    "zero2": (2, ["parallel.data=2", "parallel.zero=2"]),
    "zero3": (2, ["parallel.data=2", "parallel.zero=3"]),
    "data2xpipe2": (4, ["parallel.data=2", "parallel.pipe=2", "parallel.zero=1"]),
}


class Fault:
    """Turns a gradient, a loss or an output of one rank to NaN or infinity while it is on."""

    def __init__(self, run: Trainer, rank: int, how: str):
        self.on, self.name = False, ""
        if dist.get_rank() != rank:
            return
        if how == "loss":
            inner = run.loss
            run.loss = lambda y, t: self.spoil(*inner(y, t))
        elif how == "output":
            run.stage.register_forward_hook(lambda m, a, y: y * float("inf") if self.on else y)
        else:
            # neither the first nor the last of the stage
            name, parameter = list(run.stage.named_parameters())[3]
            self.name = run.layouts[name].name
            parameter.register_hook(lambda g: g * float("nan") if self.on else g)

    def spoil(self, total: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        return (total * float("nan") if self.on else total), count


def everything(run: Trainer) -> list[Tensor]:
    """Copies of all that a step updates on this rank."""
    if isinstance(run.optimizer, ShardedOptimizer):
        run.optimizer.finish()
    state = run.update.inner.state.values() if run.update.inner is not None else ()
    return [
        *(p.detach().clone() for p in run.stage.parameters()),
        *(x.clone() for s in state for x in s.values()),
    ]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def broken_step(extra: list[str], rank: int, how: str) -> tuple[str, str]:
    """(what every rank says, name of the parameter that was hit) of a second step that fails."""
    run = parity.trainer([*BASE, *extra])
    fault = Fault(run, rank, how)
    assert not run.train_step(1).wait().skipped
    before = everything(run)
    fault.on = True
    issued = run.train_step(2)
    assert issued.wait().skipped
    assert equal(everything(run), before), "updated"
    text = explain(run, issued)
    assert equal(everything(run), before), "updated by looking for the cause"
    fault.on = False
    after = run.train_step(3).wait()
    skips = run.plan.config.train.on_nonfinite == "skip"
    assert not after.skipped
    assert equal(everything(run), before) != skips, "skip goes on, stop stands still"
    return text, fault.name


CASES = [
    (name, rank, how)
    for name, (size, _) in LAYOUTS.items()
    for rank in range(size)
    for how in ("gradient", "loss", "output")
    if how == "gradient" or not ("pipe" in name and rank % 2 == 0 and how == "loss")
]
SMALL_SET = [("data2", 0, "loss"), ("pipe2", 0, "output"), ("zero3", 1, "gradient")]


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in SMALL_SET else pytest.mark.full) for c in CASES]
)
def test_nothing_is_updated_and_the_culprit_is_named(ranks, case):
    name, rank, how = case
    size, extra = LAYOUTS[name]
    policy = f"train.on_nonfinite={('skip', 'stop')[rank % 2]}"
    told = ranks(size).run(broken_step, [*extra, policy], rank, how)
    texts = {text for text, _ in told}
    assert len(texts) == 1
    (text,) = texts
    stage = 0
    if "pipe" in name:
        # outermost first: data, pipe
        stage = rank % 2
    assert text.startswith("step 2: ")
    if how == "gradient":
        assert (
            text == f"step 2: on rank {rank}, stage {stage} the gradient of {told[rank][1]} is "
            "not finite"
        )
    elif not name.startswith("tensor"):
        word = "output" if how == "output" else "loss"
        assert f"the {word} of microbatch 0 is not finite on rank {rank}, stage {stage}" in text
        assert "the gradient of " in text
    else:
        assert "microbatch 0 is not finite on rank" in text


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [("pipe2", 1, "loss"), ("zero3", 1, "gradient")])
def test_where_batches_are_made_ahead_the_step_is_done_again_with_its_own(pool, case):
    name, rank, how = case
    size, extra = LAYOUTS[name]
    skip = "train.on_nonfinite=skip"
    early = pool(size).run(broken_step, [*extra, skip], rank, how)
    assert pool(size).run(broken_step, [*extra, skip], rank, how, transport="late") == early


def broken_chunk(how: str) -> tuple[str, str]:
    """(what is said, parameter that was hit) of a fault in the second stage of rank 1, stage 2."""
    run = parity.trainer([*BASE, "parallel.pipe=2", "pipeline.schedule=zb-v"])
    name, parameter = list(run.stage.named_parameters())[-1]
    if dist.get_rank() == 1 and how == "gradient":
        parameter.register_hook(lambda g: g * float("nan"))
    elif dist.get_rank() == 1:
        run.stage.register_forward_hook(lambda m, a, y: y * float("nan") if a[0] == 2 else y)
    issued = run.train_step(1)
    assert issued.wait().skipped
    return explain(run, issued), run.layouts[name].name


def test_of_several_stages_on_a_rank_the_one_is_named(ranks):
    (text, _), (same, name) = ranks(2).run(broken_chunk, "gradient")
    assert text == same
    assert text == f"step 1: on rank 1, stage 2 the gradient of {name} is not finite"
    (text, _), _ = ranks(2).run(broken_chunk, "output")
    assert tells(text, "microbatch 0", "rank 1", "stage 2")


def whole_run(folder: str, extra: list[str]) -> tuple[str, int]:
    """(how the run ended, steps that were left out) of a run whose third step fails on rank 1."""
    run = parity.trainer([*BASE, *extra, "train.check_replicas_every=2"])
    fault, train_step = Fault(run, 1, "gradient"), run.train_step

    def broken(step: int, **more):
        fault.on = step == 3
        return train_step(step, **more)

    run.train_step = broken  # type: ignore[method-assign]
    loop = make_loop(run, TrainState(), Path(folder))
    try:
        loop.run()
    except NonFiniteError as error:
        return str(error), loop.state.step
    return "", loop.state.skipped


def test_a_run_stops_on_all_ranks_in_the_same_words(ranks, tmp_path):
    told = ranks(2).run(whole_run, str(tmp_path), LAYOUTS["zero1"][1])
    assert told[0] == told[1]
    text, step = told[0]
    assert text.startswith("step 3: on rank 1, stage 0 the gradient of ")
    assert "No rank has updated its weights with it" in text and step == 2


def test_a_run_that_skips_counts_what_it_left_out(ranks, tmp_path):
    extra = [*LAYOUTS["data2"][1], "train.on_nonfinite=skip"]
    assert ranks(2).run(whole_run, str(tmp_path), extra) == [("", 1)] * 2
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("skipped") for row in rows] == [None, None, 1, 1]
    assert rows[2]["grad_norm"] is None and rows[3]["grad_norm"] > 0
    assert rows[2].keys() <= metrics_page.keys()
