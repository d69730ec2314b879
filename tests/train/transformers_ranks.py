"""What ranks do with transformers' own modules, and transformers in one process beside them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.train import parity
from tests.train.sources import UnevenTokens
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.train.learning_rate import warmup_cosine
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.step_stats import StepResult
from torchdistpackage.train.train_state import TrainState, resume, save_state

STEPS = 3
VOCAB, SEQ_LEN = 65, 12  # an odd vocabulary, which ranks cannot share evenly
RUN = [
    *(f"data.seq_len={SEQ_LEN}", f"data.args={{seq_len: {SEQ_LEN}, vocab: {VOCAB}}}"),
    *("data.global_batch=8", "pipeline.microbatches=2", "precision.dtype=float64"),
    *("optim.clip=0.0", "optim.lr=0.01", "train.steps=5", "optim.warmup_steps=0"),
    "data.target=tests.train.sources:UnevenTokens",
]


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(model, ids, targets) -> the mean over the tokens that count."""


class Answer(NamedTuple):
    """weights: after the last step. gradients, losses: of each step, means over its tokens.

    recomputed: names of modules.
    """

    weights: parity.Held
    gradients: list[parity.Held]
    losses: list[float]
    recomputed: tuple[str, ...] = ()


@contextmanager
def everywhere_float64() -> Iterator[None]:
    """Let transformers compute in float64 what it computes in float32: norms, rotary tables."""
    wide = {"float": torch.float64, "float32": torch.float64}
    narrow = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            patch.multiple(torch, **wide),
            patch.object(torch.Tensor, "float", torch.Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(narrow)


def trainer(overrides: list[str]) -> Trainer:
    """Its forwards and backwards are in float64 throughout."""
    run = parity.trainer([*RUN, *overrides])
    plain = run.accumulate

    def accumulate(*args, **kwargs):
        with everywhere_float64():
            return plain(*args, **kwargs)

    run.accumulate = accumulate
    return run


def three_steps(overrides: list[str]) -> Answer:
    return steps_of(trainer(overrides), range(1, STEPS + 1))


def steps_of(run: Trainer, steps: range) -> Answer:
    gradients, losses = [], []
    for step in steps:
        losses.append(run.train_step(step).wait().loss)
        gradients.append(parity.held(run, "grad"))
    return Answer(parity.held(run, "data"), gradients, losses, run.recomputed)


def logged_steps(
    run: Trainer, values: Callable[[StepResult], dict[str, float]] = lambda x: dict(x.task)
) -> tuple[Answer, list[dict[str, float]]]:
    """Three steps, and what the log has of each."""
    logged: list[dict[str, float]] = []
    plain_step = run.train_step

    def train_step(step):
        result = plain_step(step).wait()
        logged.append(values(result))
        return type("Done", (), {"wait": lambda _: result})()

    run.train_step = train_step
    return steps_of(run, range(1, STEPS + 1)), logged


def expect_answers(found: Sequence[Answer], truth: Answer, least: float = 1e-30) -> None:
    """The ranks of a layout have the gradients, weights and losses of one process.

    least: see `parity.expect_close`, of gradients.
    """
    for step, expected in enumerate(truth.gradients):
        parity.expect_close([x.gradients[step] for x in found], [expected], least=least)
    parity.expect_close([x.weights for x in found], [truth.weights])
    for answer in found:
        assert answer.losses == pytest.approx(truth.losses, rel=1e-9)


def of_transformers(folder: str, loss: Loss | None = None) -> Answer:
    """The same of transformers' model in one process, without this package."""
    from transformers import AutoModelForCausalLM

    section = parity.config([*RUN, f"model.hf={folder}"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()
    named = dict(model.named_parameters())
    gradients, losses = alone(model, named, adam_of(named, section), section, loss)
    return Answer(whole(named), gradients, losses)


def alone(
    model: nn.Module,
    trained: Mapping[str, Tensor],
    adam: torch.optim.Optimizer,
    section: RunConfig,
    loss: Loss | None = None,
) -> tuple[list[parity.Held], list[float]]:
    """Gradients and losses of a plain model's first steps, at the run's learning rates."""
    data = UnevenTokens(SEQ_LEN, VOCAB)
    gradients, losses = [], []
    for step in range(1, STEPS + 1):
        ids, targets = data.batch("train", section.run.seed, step, 0, 1, section.data.global_batch)
        adam.zero_grad()
        with everywhere_float64():
            mean = (loss or loss_of)(model, ids, targets)
            mean.backward()
        gradients.append(whole({name: p.grad for name, p in trained.items()}))
        set_rate(adam, section, step)
        adam.step()
        losses.append(mean.item())
    return gradients, losses


def adamw(trained: Iterable[Tensor], section: RunConfig) -> torch.optim.AdamW:
    """torch's own, as a run has it."""
    optim = section.optim
    how = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    return torch.optim.AdamW(trained, **how, weight_decay=optim.weight_decay)


def adam_of(named: Mapping[str, Tensor], section: RunConfig) -> torch.optim.AdamW:
    """torch's own over the parameters of a model, of which matrices decay that are no bias by their
    name, as transformers' Trainer has it.
    """
    optim = section.optim
    decay = {n for n, p in named.items() if p.dim() > 1 and "bias" not in n}
    groups = [
        {"params": [named[n] for n in named if n in decay], "weight_decay": optim.weight_decay},
        {"params": [named[n] for n in named if n not in decay], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


def set_rate(adam: torch.optim.Optimizer, section: RunConfig, step: int) -> None:
    """The learning rate of a step, counted from 1, of a run without warm-up."""
    optim, num_steps = section.optim, section.train.steps
    share = warmup_cosine(
        step - 1, warmup_steps=0, num_steps=num_steps, min_ratio=optim.min_lr_ratio
    )
    for group in adam.param_groups:
        group["lr"] = optim.lr * share


def whole(tensors: Mapping[str, Tensor | None]) -> parity.Held:
    renamed = {name.replace("embed_out.", "lm_head."): x for name, x in tensors.items()}
    return [  # the head of GPT-NeoX has either name, by release
        (name, tuple(x.shape), tuple(slice(0, k) for k in x.shape), x.detach().clone())
        for name, x in renamed.items()
        if x is not None
    ]


def loss_of(model, ids: Tensor, targets: Tensor) -> Tensor:
    """transformers' own loss where labels are those of the next token already."""
    return model(input_ids=ids, labels=targets, shift_labels=targets, use_cache=False).loss


def initial(overrides: list[str]) -> parity.Held:
    """Weights of a run before its first step."""
    return parity.held(parity.trainer([*RUN, *overrides]), "data")


def save_model(config: dict, folder: str, dtype: str = "float64", **how: object) -> str:
    """A folder of transformers with all weights away from where they begin."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    made = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(made).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, **how)
    return str(Path(folder))


def two_steps_and_save(overrides: list[str], folder: str) -> list[float]:
    run = trainer(overrides)
    losses = [run.train_step(step).wait().loss for step in (1, 2)]
    save_state(run, TrainState(step=2), Path(folder), keep_last=1)
    return losses


def third_step(overrides: list[str], folder: str) -> Answer:
    """Of a run that goes on from a checkpoint."""
    run = trainer(overrides)
    assert resume(run, Path(folder), "auto").step == 2
    return steps_of(run, range(3, 4))
