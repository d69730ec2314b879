"""A checkpoint of transformers' Trainer is gone on with: the next step is that of its own."""

import json
from pathlib import Path

import pytest
import torch

from tests.train import parity
from tests.train.sources import UnevenTokens
from tests.train.test_transformers import MODELS
from tests.train.transformers_ranks import (
    RUN,
    SEQ_LEN,
    VOCAB,
    Answer,
    everywhere_float64,
    save_model,
    steps_of,
    trainer,
    whole,
)
from torchdistpackage.cli.main import main
from torchdistpackage.plan.resume_check import resumed_from
from torchdistpackage.train.train_state import resume

pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
LAYOUTS = {
    "one": (1, []),
    "zero2": (2, ["parallel.data=2", "parallel.zero=2"]),
    "tensor2": (2, ["parallel.tensor=2"]),
    "pipe2": (2, ["parallel.pipe=2"]),
    "zero3": (2, ["parallel.data=2", "parallel.zero=3"]),
}
SMALL_SET = ("one", "zero2", "tensor2")
CHANGES = ["optim.schedule=constant", "optim.weight_decay=0.1"]


def next_step(overrides: list[str], folder: str, checkpoint: str) -> Answer:
    """The step behind a checkpoint of the Trainer."""
    run = trainer(overrides)
    assert resume(run, Path(folder), checkpoint).step == 2
    return steps_of(run, range(3, 4))


def of_trainer(model: str, folder: str) -> tuple[parity.Held, str]:
    """Return the weights after three steps of transformers' Trainer, and its checkpoint of two."""
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    section = parity.config([*RUN, *CHANGES, f"model.hf={model}"])
    source, optim, size = UnevenTokens(SEQ_LEN, VOCAB), section.optim, section.data.global_batch
    rows: list[dict[str, list[int]]] = []
    for step in (1, 2, 3):
        ids, targets = source.batch("train", section.run.seed, step, 0, 1, size)
        for inputs, labels in zip(ids, targets, strict=True):
            # transformers shifts labels by one; the last input has a target of its own
            last = labels[-1:].clamp(min=0)
            rows.append(
                {
                    "input_ids": [*inputs.tolist(), *last.tolist()],
                    "labels": [-100, *labels.tolist()],
                }
            )
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    options = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=size,
        max_steps=3,
        learning_rate=optim.lr,
        lr_scheduler_type="constant",
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps,
        max_grad_norm=0.0,
        save_strategy="steps",
        save_steps=2,
        train_sampling_strategy="sequential",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )

    class WideTrainer(Trainer):
        """Its forwards and backwards are in float64 throughout; what it saves is as it is."""

        def training_step(self, *args, **kwargs):
            with everywhere_float64():
                return super().training_step(*args, **kwargs)

    WideTrainer(model=made, args=options, train_dataset=rows).train()
    return whole(dict(made.named_parameters())), f"{folder}/checkpoint-2"


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory) -> tuple[str, parity.Held, str]:
    folder = tmp_path_factory.mktemp("trainer")
    model = str(folder / "model")
    ranks(1).run(save_model, MODELS["llama"], model)
    return model, *ranks(1).run(of_trainer, model, str(folder / "out"))[0]


@pytest.mark.parametrize(
    "layout", [x if x in SMALL_SET else pytest.param(x, marks=pytest.mark.full) for x in LAYOUTS]
)
def test_the_next_step_is_that_of_the_trainer(ranks, trained, tmp_path, layout):
    model, truth, checkpoint = trained
    number, changes = LAYOUTS[layout]
    overrides = [*CHANGES, f"model.hf={model}", *changes]
    answers = ranks(number).run(next_step, overrides, str(tmp_path), checkpoint)
    parity.expect_close([x.weights for x in answers], [truth])


def test_what_is_no_such_checkpoint_is_refused(trained, tmp_path, capsys):
    _, _, checkpoint = trained
    copy = tmp_path / "checkpoint-2"
    copy.mkdir()
    for file in Path(checkpoint).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())

    def refused(*words: str) -> None:
        command = ["checkpoint", "import", str(copy), str(tmp_path / "new"), "--from", "hf-trainer"]
        assert main(command) != 0
        text = capsys.readouterr().err
        assert all(word in text for word in words), text

    assert resumed_from(str(copy), tmp_path / "run" / "checkpoints") is None
    state = torch.load(copy / "optimizer.pt", weights_only=True)
    torch.save(
        {**state, "state": {n: {"step": x["step"]} for n, x in state["state"].items()}},
        copy / "optimizer.pt",
    )
    refused("AdamW", "exp_avg")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    refused("groups of", "another model")
    (copy / "optimizer.pt").unlink()
    refused("no optimizer.pt", "save_only_model")
    (copy / "adapter_config.json").write_text("{}")
    refused("adapters of peft")
    (copy / "trainer_state.json").unlink()
    refused("trainer_state.json")
