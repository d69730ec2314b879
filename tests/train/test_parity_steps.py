"""Mistakes in what a run does between steps: its norm, its update, its saves and its random state.

Each is planted in a rank that takes the steps of `tdp prove`, and named with its stage and kind.
"""

import json
import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.config.load import loads
from torchdistpackage.equivalence.compare import failure_of, first_difference
from torchdistpackage.equivalence.record import ParityRecord
from torchdistpackage.plan.parity_model import model_plan
from torchdistpackage.plan.parity_plan import parity_run
from torchdistpackage.plan.run_plan import make_plan, num_ranks
from torchdistpackage.train import parity_steps
from torchdistpackage.train.update import Update

GPT = ["model.layers=2", "model.dim=32", "model.heads=4", "model.dropout=0.1", "data.seq_len=16"]
LLAMA = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]):
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def on_resume(change: Callable[[Any, int], None]):
    """Do something after each resume, of which the second number counts."""
    number = [0]

    def make(original: Any):
        def resumed(trainer: Any, *args: Any, **kwargs: Any):
            state = original(trainer, *args, **kwargs)
            number[0] += 1
            change(trainer, number[0])
            return state

        return resumed

    return replaced(parity_steps, "resume", make)


def forget_state(trainer: Any, number: int) -> None:
    for state in trainer.optimizer.state.values():
        state["exp_avg"].zero_()


def forget_random(trainer: Any, number: int) -> None:
    if dist.get_rank() > 0:
        torch.manual_seed(3)


def begin_anew(trainer: Any, number: int) -> None:
    make = trainer.batches.of_training
    if number == 2:
        trainer.batches.of_training = lambda step, index: make(step - 2, index)


def wrong_norm(original: Any):
    def measure(self: Update):
        power, norms = original(self)
        return power * (2.0 if dist.get_world_size() > 1 else 1.0), norms

    return measure


def wrong_factor(original: Any):
    def factor(self: Update, tokens: Any, power: Any):
        return original(self, tokens, power) / dist.get_world_size()

    return factor


PLANTS: dict[str, Callable[[], Any]] = {
    "norm": lambda: replaced(Update, "measure", wrong_norm),
    "factor": lambda: replaced(Update, "_factor", wrong_factor),
    "state": lambda: on_resume(forget_state),
    "random": lambda: on_resume(forget_random),
    "samples": lambda: on_resume(begin_anew),
}


def planted(config: Any, axes: dict[str, int], saves: str, name: str, wrong: str) -> ParityRecord:
    with PLANTS[wrong]():
        return parity_steps.record_run(config, axes, saves, name)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("wrong", "optimizer", "stage", "kind", "factor"),
    [
        ("random", "adamw", "random", "random state after a resume", "on rank 1"),
        ("samples", "adamw", "samples", "data after a resume", ""),
        ("state", "adamw", "state", "state after a resume", ""),
        ("norm", "adamw", "norm", "norm", "x 1.414"),
        ("factor", "sgd", "update", "gradient divided", "/ 2"),
    ],
)
def test_a_mistake_between_steps_is_named(
    pool, tmp_path, wrong: str, optimizer: str, stage: str, kind: str, factor: str
):
    words = [*GPT, "parallel.data=2", f"optim.name={optimizer}", "optim.clip=0"]
    words.append("optim.weight_decay=0")
    config = loads("launch: {local: {procs: null}}", overrides=words)
    run = parity_run(make_plan(config, num_ranks(config)))
    ((axes, layout),) = run.layouts
    (one,) = pool(1).run(parity_steps.record_run, run.whole, {}, str(tmp_path))
    records = pool(2).run(planted, layout, axes, str(tmp_path), "two", wrong)
    found = first_difference(one, records, axes)
    assert found is not None
    assert (found.stage, found.kind, found.factor) == (stage, kind, factor), str(found)
    assert found.axis == ("data and resume" if "resume" in kind else "data")


def test_padding_is_no_token_of_a_text(pool, tmp_path):
    """Its row is zeros, of which a class may have no gradient."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["data.target=tests.replay.sources:Tokens", "data.args={seq_len: 16, vocab: 256}"]
    plan, _ = model_plan(str(tmp_path), [*words, "parallel.data=2"], tmp_path)
    small = Path(str(plan.config.model.hf))
    small.write_text(json.dumps(json.loads(small.read_text()) | {"pad_token_id": 127}))
    (one,) = pool(1).run(parity_steps.record_run, parity_run(plan).whole, {})
    ids = set(one.inputs[0].flatten().tolist())
    assert 127 not in ids and ids & {126, 128}


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_one_process_whose_norm_is_no_number_is_nothing_to_compare_with(number: float):
    right = ParityRecord({}, losses=[1.0, 1.0], norms=[0.5, 0.5])
    assert failure_of(right) == ""
    wrong = replace(right, norms=[0.5, number])
    assert failure_of(wrong) == f"its gradient norm of step 2 is {number}"
    assert failure_of(replace(wrong, error="head: raised")) == "head: raised"
