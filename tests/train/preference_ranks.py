"""What ranks do with preference pairs, and the formula of DPO on transformers in one process."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.data.texts import WORDS, save_lines, save_tokenizer
from tests.train import parity
from tests.train.lora_ranks import peft_model, plain
from tests.train.transformers_ranks import (
    Answer,
    adam_of,
    everywhere_float64,
    logged_steps,
    set_rate,
    whole,
)
from torchdistpackage.config.schema import RunConfig
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.build import build_data
from torchdistpackage.train.step import Trainer
from torchdistpackage.train.train_state import TrainState, resume, save_state

STEPS = 3
RUN = [
    *("data.name=preference", "data.seq_len=24", "data.global_batch=4", "pipeline.microbatches=2"),
    *("precision.dtype=float64", "optim.clip=0.0", "optim.lr=0.01", "optim.warmup_steps=0"),
    *("train.steps=5", "train.dpo={beta: 0.7, label_smoothing: 0.1}", "data.val_fraction=0.2"),
    *("train.eval_batches=1",),
]


def pair(number: int) -> dict[str, str]:
    words = [WORDS[(number * 7 + i) % len(WORDS)] for i in range(9)]
    cut = 2 + number % 4
    return {
        "prompt": " ".join(words[:cut]) + " ",
        "chosen": " ".join(words[cut:]),
        "rejected": " ".join(words[cut - 1 : 7]),
    }


def data_keys(folder: Path, number: int = 21) -> list[str]:
    path = save_lines(folder / "pairs.jsonl", [pair(i) for i in range(number)])
    tokenizer = save_tokenizer(folder / "tokenizer")
    return [
        f"data.path={path}",
        f"data.tokenizer={tokenizer}",
        f"data.cache={folder}/cache",
        "model.vocab=300",
    ]


def trainer(overrides: list[str]) -> Trainer:
    """Its forwards and backwards are in float64 throughout."""
    run = parity.trainer([*RUN, *overrides])
    accumulate, evaluate = run.accumulate, run.evaluate

    def wide(call):
        def within(*args, **kwargs):
            with everywhere_float64():
                return call(*args, **kwargs)

        return within

    run.accumulate, run.evaluate = wide(accumulate), wide(evaluate)
    return run


def preferred(overrides: list[str]) -> tuple[Answer, list[dict[str, float]], float | None, dict]:
    """Three steps, what the log has of their pairs, and a validation."""
    run = trainer(overrides)
    answer, logged = logged_steps(run)
    return answer, logged, run.evaluate(), dict(run.val_task)


def of_formula(overrides: list[str], options: dict | None = None, initial: dict | None = None):
    """`preferred` by the formula, on transformers' model (and peft's adapters) in one process."""
    from transformers import AutoModelForCausalLM

    section = parity.config([*RUN, *overrides])
    assert section.model.hf is not None
    if options is None:
        model = AutoModelForCausalLM.from_pretrained(section.model.hf, dtype=torch.float64).train()
        reference = copy.deepcopy(model).eval()
        named = dict(model.named_parameters())
    else:
        assert initial is not None
        model = peft_model(section.model.hf, initial, options)
        reference = AutoModelForCausalLM.from_pretrained(section.model.hf, dtype=torch.float64)
        reference.eval()
        named = {plain(n): p for n, p in model.named_parameters() if p.requires_grad}
    adam = adam_of(named, section)
    gradients, losses, logged = [], [], []
    for step, (ids, targets) in enumerate(_rows(section, "train"), 1):
        adam.zero_grad()
        with everywhere_float64():
            loss, pairs = dpo(model, reference, ids, targets, section)
            loss.backward()
        gradients.append(whole({name: p.grad for name, p in named.items()}))
        losses.append(loss.item())
        logged.append(pairs)
        set_rate(adam, section, step)
        adam.step()
    held = {plain(n): p for n, p in model.named_parameters()} if options else named
    with everywhere_float64(), torch.no_grad():
        val, val_pairs = dpo(model.eval(), reference, *next(_rows(section, "val")), section)
    return Answer(whole(held), gradients, losses), logged, val.item(), val_pairs


def _rows(section: RunConfig, split: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of whole steps."""
    data = build_data(make_plan(section, 1))
    num = 2 * section.data.global_batch
    for step in range(1, STEPS + 1):
        yield data.batch(split, section.run.seed, step - (split == "val"), 0, 1, num)[:2]


def dpo(
    model: nn.Module, reference: nn.Module, ids: Tensor, targets: Tensor, section: RunConfig
) -> tuple[Tensor, dict[str, float]]:
    """The loss of pairs as its paper has it, as a mean over pairs."""
    options = section.train.dpo
    beta, smoothing, name = options.beta, options.label_smoothing, options.loss

    def sums(of: nn.Module) -> Tensor:
        logits = of(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        picked = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (picked * (targets >= 0)).sum(1)

    found = sums(model)
    with torch.no_grad():
        known = sums(reference) * (name not in ("simpo", "orpo"))
    whole, number = found - known, (targets >= 0).sum(1)
    if name not in ("sigmoid", "hinge"):
        whole = whole / number
    chosen, rejected = (beta * whole[side::2] for side in (0, 1))
    margin = chosen - rejected
    wanted = margin - options.gamma if name == "simpo" else margin
    loss = -(1 - smoothing) * wanted.sigmoid().log() - smoothing * (1 - wanted.sigmoid()).log()
    if name == "hinge":
        loss = (1 - margin).clamp(min=0)
    elif name == "ipo":
        loss = (margin / beta - 0.5 / beta) ** 2
    elif name == "orpo":
        good, bad = (whole[side::2].exp() for side in (0, 1))
        ratio = (good / (1 - good)) / (bad / (1 - bad))
        loss = -whole[::2] - beta * (ratio / (1 + ratio)).log()
    if name in ("simpo", "orpo"):
        found = found / number
    else:  # trl logs sums
        chosen, rejected = (beta * (found - known)[side::2] for side in (0, 1))
    margin = chosen - rejected
    return loss.mean(), {
        "rewards/chosen": chosen.mean().item(),
        "rewards/rejected": rejected.mean().item(),
        "rewards/accuracies": (margin > 0).double().mean().item(),
        "rewards/margins": margin.mean().item(),
        "logps/chosen": found[::2].mean().item(),
        "logps/rejected": found[1::2].mean().item(),
    }


def initial_of(overrides: list[str]) -> parity.Held:
    return parity.held(parity.trainer([*RUN, *overrides]), "data")


def save_after(overrides: list[str], folder: str, num: int) -> list[float]:
    run = trainer(overrides)
    losses = [run.train_step(step).wait().loss for step in range(1, num + 1)]
    save_state(run, TrainState(step=num), Path(folder), keep_last=1)
    return losses


def third_step(overrides: list[str], folder: str) -> tuple[Answer, dict[str, float]]:
    """Of a run that goes on from a checkpoint."""
    run = trainer(overrides)
    assert resume(run, Path(folder), "auto").step == 2
    result = run.train_step(3).wait()
    answer = Answer(parity.held(run, "data"), [parity.held(run, "grad")], [result.loss])
    return answer, dict(result.task)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
