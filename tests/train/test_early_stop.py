"""`train.early_stop`: the rule is that of transformers, and a resumed run follows it as one start
would.
"""

import json
import math
import random
from types import SimpleNamespace

import pytest
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from torchdistpackage.checkpoint.commit import candidates
from torchdistpackage.checkpoint.manifest import read_manifest
from torchdistpackage.config.schema import EarlyStopSection
from torchdistpackage.errors import ConfigError
from torchdistpackage.train.early_stop import EarlyStop
from torchdistpackage.train.train_state import BestSoFar, TrainState


def stopped_at(values: list[float], section: EarlyStopSection) -> tuple[int | None, int]:
    """(validation after which the run ends, the best one), from 1; each begins a new start."""
    loop = SimpleNamespace(state=TrainState(), saves=False, log=SimpleNamespace(note=lambda **x: 0))
    ends: list[str] = []
    loop.end_early = ends.append
    for step, value in enumerate(values, 1):
        callback = EarlyStop(section)
        callback.on_begin(loop)  # type: ignore
        if ends:
            break
        loop.state.step = step
        for _ in range(2):  # the step that a complete run validates again does not count twice
            callback.on_validated(loop, {str(section.metric): value})  # type: ignore
    return loop.state.best.validated_step if ends else None, loop.state.best.step


def of_transformers(values: list[float], section: EarlyStopSection) -> tuple[int | None, int]:
    callback = EarlyStoppingCallback(section.patience, section.min_delta)
    greater = section.is_greater_better
    options = TrainingArguments(metric_for_best_model="x", greater_is_better=greater)
    state, best = TrainerState(), 0
    for step, value in enumerate(values, 1):
        control = TrainerControl()
        callback.on_evaluate(options, state, control, {"eval_x": value})
        # transformers.Trainer._determine_best_metric
        known = state.best_metric
        if known is None or (value > known if greater else value < known):
            state.best_metric, best = value, step
        if control.should_training_stop:
            return step, best
    return None, best


@pytest.mark.parametrize("metric", ["val_loss", "eval_rewards/accuracies"])
def test_the_rule_is_that_of_transformers(metric):
    ended = 0
    for seed in range(60):
        rng = random.Random(seed)
        values = [rng.choice([1.0, 1.1, 1.25, 2.0, rng.random()]) for _ in range(8)]
        section = EarlyStopSection(
            metric=metric, patience=rng.randint(1, 4), min_delta=rng.choice([0.0, 0.1, 0.5])
        )
        truth = of_transformers(values, section)
        if truth[0] is not None and seed % 2:
            values[truth[0] :] = [100.0, -100.0]  # too late
        assert stopped_at(values, section) == truth, (seed, values, section)
        ended += truth[0] is not None
    assert 20 < ended < 60, ended


def test_errors_have_to_fall_as_losses_do():
    for metric, values in (("eval_mae", [2.0, 1.0, 0.5]), ("eval_pearson", [0.1, 0.2, 0.3])):
        section = EarlyStopSection(metric=metric, patience=2)
        assert stopped_at(values, section) == (None, 3)


def test_numbers_that_are_not_finite_never_improve():
    section = EarlyStopSection(metric="val_loss", patience=2)
    assert stopped_at([math.nan, math.inf, 1.0], section) == (2, 0)
    with pytest.raises(ConfigError, match=r"metric=val_loss .* name one of web"):
        loop = SimpleNamespace(state=TrainState())
        callback = EarlyStop(section)
        callback.on_begin(loop)  # type: ignore
        callback.on_validated(loop, {"web": 1.0})  # type: ignore


def test_a_value_that_is_undefined_for_once_does_not_improve():
    section = EarlyStopSection(metric="eval_pearson", patience=3)
    state = TrainState(best=BestSoFar("eval_pearson", 0.5, 1, 0, 1), step=2)
    loop = SimpleNamespace(state=state, saves=False, log=SimpleNamespace(note=lambda **x: 0))
    EarlyStop(section).on_validated(loop, {"val_loss": 1.0})  # type: ignore
    assert state.best == BestSoFar("eval_pearson", 0.5, 1, 1, 2)


def test_a_resumed_run_ends_where_one_start_would_and_keeps_its_best(tdp, tmp_path):
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/runs, name: r}}")
    words = ["train", str(tmp_path / "run.yaml"), "parallel.data=2", "parallel.zero=2"]
    words += ["model.layers=1", "model.dim=16", "model.heads=2", "data.seq_len=16"]
    words += ["data.global_batch=4", "pipeline.microbatches=1", "optim.schedule=constant"]
    words += ["train.eval_every=1", "train.eval_batches=1", "optim.lr=0.3", "log.plot=false"]
    words += ["checkpoint.save_every=100", "checkpoint.keep_last=1", "train.generate_tokens=0"]
    words += ["train.early_stop={metric: val_loss, patience: 3}"]
    run = tmp_path / "runs" / "r"

    def rows() -> list[dict]:
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

    code, said = tdp([*words, "train.steps=3"])
    assert code == 0 and len(rows()) == 3, said
    code, said = tdp([*words, "train.steps=60"])
    assert code == 0, said
    losses = [row["val_loss"] for row in rows()]
    section = EarlyStopSection(metric="val_loss", patience=3)
    end, best = of_transformers(losses, section)
    assert end == len(losses) < 60 and rows()[-1]["best_step"] == best
    assert f"stopped early at step {end}" in said and f"step_{best:06d}" in said.replace("\n", "")
    kept = {x.step for x in map(read_manifest, candidates(run / "checkpoints"))}
    assert kept == {end, best}
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert events[-1]["word"] == "finished" and f"at step {best}" in events[-1]["reason"]
