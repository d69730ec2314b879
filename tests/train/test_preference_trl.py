"""DPO, SimPO, ORPO and KTO beside trl's own trainers, from one file of answers: losses, rewards,
weights of three steps.
"""

import warnings

import pytest
import torch

from tests.data.texts import WORDS, save_lines, save_tokenizer
from tests.train import parity
from tests.train.peer_trainers import answer_options, expect_logged, peer_tokenizer
from tests.train.preference_ranks import RUN, lines_of, preferred, whole
from tests.train.test_transformers import MODELS
from tests.train.transformers_ranks import everywhere_float64, save_model
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.build import build_data

trl = pytest.importorskip("trl", reason="trl is no dependency: its trainer is the peer")
pytestmark = pytest.mark.full
NUM = 4
# trl smooths labels in other losses than its "sigmoid", so there is no smoothing here
PLAIN = [x for x in RUN if not x.startswith("train.dpo")]
CHANGES = [
    f"data.global_batch={NUM}",
    "optim.schedule=constant",
    "train.steps=3",
    "train.dpo={beta: 0.7}",
]


def rows(first: int) -> list[dict[str, str]]:
    def words(start: int, number: int) -> str:
        return "".join(f" {WORDS[(start + i) % len(WORDS)]}" for i in range(number))

    return [
        {"prompt": f"q{i}" + words(i, 3), "chosen": words(2 * i, 4), "rejected": words(3 * i, 6)}
        for i in range(first, first + NUM)
    ]


def one_token_prompts(first: int) -> list[dict[str, str]]:
    """Pairs of which every token but the first is one of the answer, all chosen ones as long: there
    trl's first term of ORPO, a mean over all tokens of a batch, is the mean over answers.
    """
    pairs = rows(first)
    words = WORDS[:4]
    turned = ["".join(f" {x}" for x in (*words[i:], *words[:i])) for i in range(len(pairs))]
    return [{**x, "prompt": "qvxz"[i], "chosen": turned[i]} for i, x in enumerate(pairs)]


def labelled(first: int) -> list[dict[str, str | bool]]:
    return [
        {"prompt": x["prompt"], "completion": x["chosen"], "label": i % 2 == 0}
        for i, x in enumerate(rows(first))
    ]


def in_order_of_steps(overrides: list[str], lines: list[dict], tokenizer) -> list[dict]:
    """The answers of three steps, as our run draws them: trl's mismatched answers follow it."""
    section = parity.config([*PLAIN, *overrides])
    data = build_data(make_plan(section, 1))
    texts = [tokenizer(x["prompt"] + x["completion"])["input_ids"] for x in lines]
    ordered: list[dict] = []
    for step in (1, 2, 3):
        for ids in data.batch("train", section.run.seed, step, 0, 1, 2 * NUM)[0][::2].tolist():
            found = [x for x, text in zip(lines, texts, strict=True) if ids[: len(text)] == text]
            ordered += found
    assert len(ordered) == 3 * NUM
    return ordered


def peer(loss: str) -> tuple[type, type, dict]:
    """trl's trainer, its options, and their values."""
    from trl.experimental import cpo, orpo

    if loss == "simpo":
        more = {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.3}
        return cpo.CPOTrainer, cpo.CPOConfig, {**more, "remove_unused_columns": False}
    if loss == "orpo":
        return orpo.ORPOTrainer, orpo.ORPOConfig, {"remove_unused_columns": False}
    if loss == "kto":
        more = {"desirable_weight": 1.5, "undesirable_weight": 0.5, "num_train_epochs": 1}
        return trl.KTOTrainer, trl.KTOConfig, more
    return trl.DPOTrainer, trl.DPOConfig, {"loss_type": loss}


def of_trl(folder: str, model: str, tokenizer: str, overrides: list[str], lines: list[dict]):
    """Return (weights, rows of the log) of trl's trainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    section, made = parity.config([*PLAIN, *overrides]), peer_tokenizer(tokenizer)
    held = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    loss = section.train.dpo.loss
    make, make_options, more = peer(loss)
    common = {**answer_options(section, folder, NUM), "beta": section.train.dpo.beta}
    options = make_options(**{**common, **more})
    if loss == "kto":
        lines = in_order_of_steps(overrides, lines, made)
    data = Dataset.from_list(lines)
    with everywhere_float64():
        trainer = make(model=held, args=options, train_dataset=data, processing_class=made)
        trainer.train()
    logged = [row for row in trainer.state.log_history if "rewards/margins" in row]
    return whole(dict(held.named_parameters())), logged


LINES = {"orpo": one_token_prompts, "kto": labelled}
KEYS = {
    "simpo": ["train.dpo={loss: simpo, beta: 0.7, gamma: 0.3}"],
    "kto": [
        "data.name=unpaired_preference",
        "train.dpo={loss: kto, beta: 0.7, desirable_weight: 1.5, undesirable_weight: 0.5}",
    ],
}


@pytest.mark.parametrize(
    "loss", ["sigmoid", "sigmoid_norm", "hinge", "ipo", "simpo", "orpo", "kto"]
)
def test_three_steps_are_those_of_trl(ranks, tmp_path, loss):
    model = str(tmp_path / "model")
    ranks(1).run(save_model, {**MODELS["llama"], "vocab_size": 300}, model)
    lines = LINES.get(loss, rows)
    path, val = (save_lines(tmp_path / f"{i}.jsonl", lines(i)) for i in (0, 100))
    assert len(lines_of(path)) == NUM
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    overrides = [f"model.hf={model}", f"data.path={path}", f"data.val_path={val}", *CHANGES]
    overrides += [f"data.tokenizer={tokenizer}", f"data.cache={tmp_path}/cache"]
    overrides += KEYS.get(loss, [f"train.dpo.loss={loss}"])
    ((mine, logged, *_),) = ranks(1).run(preferred, overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, theirs = of_trl(str(tmp_path / "out"), model, str(tokenizer), overrides, lines(0))
    # before the first step all margins are 0, which trl computes up to its last digits
    if loss in ("sigmoid", "sigmoid_norm", "hinge", "ipo"):
        assert logged[0].pop("rewards/accuracies") == 0
    expect_logged(mine.losses, logged, theirs)
    parity.expect_close([mine.weights], [weights])
