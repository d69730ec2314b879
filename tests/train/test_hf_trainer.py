"""A checkpoint of transformers' Trainer or trl's is gone on with: the next step is its own."""

import json
import warnings
from pathlib import Path

import pytest
import torch

from tests.data.texts import save_tokenizer
from tests.train import parity
from tests.train.peer_trainers import peer_tokenizer, training_options
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


def trainer_of(
    peer: str, rows: list[dict[str, list[int]]], folder: str
) -> tuple[type, type, dict, dict]:
    """Return a Trainer of this library, that of its options, what it is made with, and options."""
    import transformers

    if peer == "transformers":
        return transformers.Trainer, transformers.TrainingArguments, {"train_dataset": rows}, {}
    import trl
    from datasets import Dataset

    # it would tokenize texts, recompute blocks and compute in bfloat16
    options = {
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "gradient_checkpointing": False,
        "bf16": False,
    }
    tokenizer = peer_tokenizer(save_tokenizer(Path(folder) / "tokenizer"))
    made = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer}
    return trl.SFTTrainer, trl.SFTConfig, made, options


def of_trainer(model: str, folder: str, peer: str) -> tuple[parity.Held, str]:
    """Return the weights after three steps of a peer's Trainer, and its checkpoint of two."""
    from transformers import AutoModelForCausalLM

    section = parity.config([*RUN, *CHANGES, f"model.hf={model}"])
    source, size = UnevenTokens(SEQ_LEN, VOCAB), section.data.global_batch
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
    base, arguments, inputs, more = trainer_of(peer, rows, folder)

    class WideTrainer(base):
        """Its forwards and backwards are in float64 throughout; what it saves is as it is."""

        def training_step(self, *args, **kwargs):
            with everywhere_float64():
                return super().training_step(*args, **kwargs)

    with warnings.catch_warnings():
        if peer == "trl":  # it names options of transformers as earlier versions did
            warnings.simplefilter("ignore")
        options = arguments(
            **training_options(section, folder, size),
            **more,
            max_steps=3,
            save_strategy="steps",
            save_steps=2,
            train_sampling_strategy="sequential",
        )
        WideTrainer(model=made, args=options, **inputs).train()
    return whole(dict(made.named_parameters())), f"{folder}/checkpoint-2"


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """(model's folder, weights after three steps, checkpoint of two) of a peer, each made once."""
    folder = tmp_path_factory.mktemp("trainer")
    model = str(folder / "model")
    ranks(1).run(save_model, MODELS["llama"], model)
    made: dict[str, tuple[str, parity.Held, str]] = {}

    def of(peer: str) -> tuple[str, parity.Held, str]:
        if peer not in made:
            answer = ranks(1).run(of_trainer, model, str(folder / peer), peer)[0]
            made[peer] = model, *answer
        return made[peer]

    return of


@pytest.mark.parametrize(
    ("peer", "layout"),
    [
        *(("transformers", x) for x in SMALL_SET),
        *(
            pytest.param("transformers", x, marks=pytest.mark.full)
            for x in LAYOUTS
            if x not in SMALL_SET
        ),
        ("trl", "zero2"),
    ],
)
def test_the_next_step_is_that_of_the_trainer(ranks, trained, tmp_path, peer, layout):
    if peer == "trl":
        pytest.importorskip("trl", reason="trl is no dependency: its trainer is the peer")
    model, truth, checkpoint = trained(peer)
    number, changes = LAYOUTS[layout]
    overrides = [*CHANGES, f"model.hf={model}", *changes]
    answers = ranks(number).run(next_step, overrides, str(tmp_path), checkpoint)
    parity.expect_close([x.weights for x in answers], [truth])


def test_what_is_no_such_checkpoint_is_refused(trained, tmp_path, capsys):
    _, _, checkpoint = trained("transformers")
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
