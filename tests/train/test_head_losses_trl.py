"""Rewards of pairs beside trl's own RewardTrainer, from one file: losses, values of the log and
weights of three steps.
"""

import warnings

import pytest
import torch

from tests.data.texts import save_lines, save_tokenizer
from tests.train import parity
from tests.train.head_ranks import BASE, rows_of, save_head, trained
from tests.train.peer_trainers import answer_options, expect_logged, peer_tokenizer
from tests.train.test_head_losses import CONFIG
from tests.train.transformers_ranks import everywhere_float64, whole

trl = pytest.importorskip("trl", reason="trl is no dependency: its trainer is the peer")
pytestmark = pytest.mark.full
NUM = 4


def of_trl(folder: str, overrides: list[str], lines: list[dict], center: float | None):
    """Return (weights, rows of the log) of trl's trainer."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification

    section = parity.config([*BASE, *overrides])
    model = AutoModelForSequenceClassification.from_pretrained(
        section.model.hf, dtype=torch.float64
    )
    options = trl.RewardConfig(
        **answer_options(section, folder, NUM), center_rewards_coefficient=center
    )
    with everywhere_float64():
        trainer = trl.RewardTrainer(
            model=model,
            args=options,
            train_dataset=Dataset.from_list(lines),
            processing_class=peer_tokenizer(section.data.tokenizer),
        )
        trainer.train()
    logged = [row for row in trainer.state.log_history if "mean_reward" in row]
    return whole(dict(model.named_parameters())), logged


@pytest.mark.parametrize("margins", [True, False], ids=["margin", "no margin"])
@pytest.mark.parametrize("center", [None, 0.05], ids=["plain", "centered"])
def test_three_steps_of_rewards_are_those_of_trl(ranks, tmp_path, margins, center):
    """Each step has all pairs, so that their order does not count."""
    model = str(tmp_path / "model")
    ranks(1).run(save_head, CONFIG, model, "ForSequenceClassification", 1)
    lines = rows_of("reward", NUM)
    assert len({x["margin"] for x in lines}) > 1
    if not margins:
        lines = [{key: x for key, x in row.items() if key != "margin"} for row in lines]
    path = save_lines(tmp_path / "rows.jsonl", lines)
    overrides = [
        *("data.name=reward", f"data.path={path}", f"data.val_path={path}"),
        *(f"data.tokenizer={save_tokenizer(tmp_path / 'tokenizer')}", "model.vocab=300"),
        *(f"data.cache={tmp_path}/cache", f"model.hf={model}", "train.dpo={}"),
        *("optim.schedule=constant", "train.steps=3", "train.eval_batches=1"),
        f"data.center_rewards={center or 0}",
    ]
    ((mine, logged, *_),) = ranks(1).run(trained, overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, theirs = of_trl(str(tmp_path / "out"), overrides, lines, center)
    kept = [{k: x for k, x in row.items() if k != "tokens"} for row in logged]
    expect_logged(mine.losses, kept, theirs)
    parity.expect_close([mine.weights], [weights])
