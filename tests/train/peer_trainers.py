"""The options of trainers of transformers and trl, and the comparison of their log with ours."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from torchdistpackage.config.schema import RunConfig


def training_options(section: RunConfig, folder: str, size: int) -> dict[str, Any]:
    """The options of a trainer that steps as the run does. size: samples of a step."""
    optim = section.optim
    return {
        "output_dir": folder,
        "per_device_train_batch_size": size,
        "learning_rate": optim.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": optim.weight_decay,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_epsilon": optim.eps,
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }


def answer_options(section: RunConfig, folder: str, size: int) -> dict[str, Any]:
    """The options of one of trl's trainers on answers, without what it would change by itself."""
    return {
        **training_options(section, folder, size),
        "max_length": section.data.seq_len,
        "logging_steps": 1,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "num_train_epochs": 3,
    }


def peer_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of `save_tokenizer`, as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", eos_token="</s>", pad_token="<pad>"
    )


def expect_logged(
    losses: Sequence[float], logged: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]
) -> None:
    """Each value that we log is in the row of the same step of a trainer, whose log rounds."""
    assert len(theirs) == len(logged) == len(losses)
    for loss, own, other in zip(losses, logged, theirs, strict=True):
        assert loss == pytest.approx(other["loss"], rel=2e-5)
        for name, value in own.items():
            assert value == pytest.approx(other[name], rel=2e-4, abs=2e-6), name
