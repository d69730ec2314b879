"""DPO beside trl's own trainer, from one file of pairs: losses, rewards, weights of three steps."""

import warnings

import pytest
import torch

from tests.data.texts import WORDS, save_lines, save_tokenizer
from tests.train import parity
from tests.train.preference_ranks import RUN, lines_of, preferred, whole
from tests.train.test_transformers import MODELS
from tests.train.transformers_ranks import everywhere_float64, save_model

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


def of_trl(folder: str, model: str, tokenizer: str, overrides: list[str]):
    """Return (weights, rows of the log) of trl's trainer."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    section = parity.config([*PLAIN, *overrides])
    made = PreTrainedTokenizerFast(
        tokenizer_file=f"{tokenizer}/tokenizer.json", eos_token="</s>", pad_token="<pad>"
    )
    held, optim = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64), section.optim
    options = trl.DPOConfig(
        output_dir=folder,
        loss_type=section.train.dpo.loss,
        beta=section.train.dpo.beta,
        max_length=section.data.seq_len,
        per_device_train_batch_size=NUM,
        num_train_epochs=3,
        learning_rate=optim.lr,
        lr_scheduler_type="constant",
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps,
        max_grad_norm=0.0,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
    )
    data = Dataset.from_list(rows(0))
    with everywhere_float64():
        trainer = trl.DPOTrainer(
            model=held, args=options, train_dataset=data, processing_class=made
        )
        trainer.train()
    logged = [row for row in trainer.state.log_history if "rewards/margins" in row]
    return whole(dict(held.named_parameters())), logged


@pytest.mark.parametrize("loss", ["sigmoid", "sigmoid_norm", "hinge", "ipo"])
def test_three_steps_are_those_of_trl(ranks, tmp_path, loss):
    model = str(tmp_path / "model")
    ranks(1).run(save_model, {**MODELS["llama"], "vocab_size": 300}, model)
    path, val = (save_lines(tmp_path / f"{i}.jsonl", rows(i)) for i in (0, 100))
    assert len(lines_of(path)) == NUM
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    overrides = [f"model.hf={model}", f"data.path={path}", f"data.val_path={val}", *CHANGES]
    overrides += [f"data.tokenizer={tokenizer}", f"data.cache={tmp_path}/cache"]
    overrides.append(f"train.dpo.loss={loss}")
    ((mine, logged, *_),) = ranks(1).run(preferred, overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights, theirs = of_trl(str(tmp_path / "out"), model, str(tokenizer), overrides)
    assert len(theirs) == 3
    # before the first step all margins are 0, which trl computes up to its last digits
    assert logged[0].pop("rewards/accuracies") == 0
    for own, other, loss in zip(logged, theirs, mine.losses, strict=True):
        assert loss == pytest.approx(other["loss"], rel=2e-5)  # which its log rounds
        for name, value in own.items():
            assert value == pytest.approx(other[name], rel=2e-4, abs=2e-6), name
    parity.expect_close([mine.weights], [weights])
