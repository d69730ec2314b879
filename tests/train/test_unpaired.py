"""`data.name: unpaired_preference`: KTO under every layout is its formula in one process."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.data.texts import WORDS, save_lines, save_tokenizer
from tests.train import parity
from tests.train.preference_ranks import RUN as PAIRS
from tests.train.preference_ranks import preferred
from tests.train.test_transformers import MODELS
from tests.train.transformers_ranks import (
    Answer,
    adam_of,
    everywhere_float64,
    expect_answers,
    save_model,
    set_rate,
    whole,
)
from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.run_plan import make_plan
from torchdistpackage.train.build import build_data

RANKS_IMPORT = ("peft",)
LOSS = "{loss: kto, beta: 0.7, desirable_weight: 1.5, undesirable_weight: 0.5}"
RUN = ["data.name=unpaired_preference", f"train.dpo={LOSS}", "data.global_batch=4"]
ADAPTERS = "model.lora={r: 3, alpha: 6, target: [q_proj, v_proj, down_proj]}"
LAYOUTS = {
    "data2-zero3": (2, ["parallel.data=2", "parallel.zero=3"]),
    "pipe2xtensor2": (4, ["parallel.pipe=2", "parallel.tensor=2"]),
    "context2": (2, ["parallel.context=2"]),
    "data2-zero2": (2, ["parallel.data=2", "parallel.zero=2", "pipeline.microbatches=1"]),
    "tensor2": (2, ["parallel.tensor=2"]),
    "interleaved": (2, ["parallel.pipe=2", "pipeline.schedule=zb-v"]),
    "data2xcontext2": (4, ["parallel.data=2", "parallel.context=2"]),
}


def answer(number: int) -> dict[str, str | bool]:
    words = [WORDS[(number * 7 + i) % len(WORDS)] for i in range(9)]
    cut = 2 + number % 4
    prompt, completion = " ".join(words[:cut]) + " ", " ".join(words[cut:])
    return {"prompt": prompt, "completion": completion, "label": number % 3 != 0}


def data_keys(folder: Path) -> list[str]:
    path = save_lines(folder / "answers.jsonl", [answer(i) for i in range(21)])
    tokenizer = save_tokenizer(folder / "tokenizer")
    keys = [f"data.path={path}", f"data.tokenizer={tokenizer}", f"data.cache={folder}/cache"]
    return [*keys, "model.vocab=300"]


def of_formula(overrides: list[str]):
    """`preferred` by the formula, on transformers' model in one process."""
    from transformers import AutoModelForCausalLM

    section = parity.config([*PAIRS, *overrides])
    options, seed = section.train.dpo, section.run.seed
    model = AutoModelForCausalLM.from_pretrained(section.model.hf, dtype=torch.float64).train()
    reference = copy.deepcopy(model).eval()
    data = build_data(make_plan(section, 1))
    named = dict(model.named_parameters())
    adam = adam_of(named, section)

    def sums(of: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
        logits = of(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        picked = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return (picked * (targets >= 0)).sum(1)

    def kto(split: str, step: int) -> tuple[Tensor, dict[str, float]]:
        ids, encoded = data.batch(split, seed, step, 0, 1, 2 * section.data.global_batch)[:2]
        bad = (encoded < -100).all(1)[::2]
        targets = torch.where(encoded == -101, -100, encoded)
        targets = torch.where(targets < -101, -102 - targets, targets)
        # the mismatched rows are the prompts with the answers of the sample before
        for row in range(len(ids) // 2):
            before = 2 * ((row - 1) % (len(ids) // 2))
            own, other = targets[2 * row + 1], targets[before]
            least = min(int((own >= 0).sum()), int((other >= 0).sum()))
            assert own[own >= 0][:least].equal(other[other >= 0][:least]) and least > 1
            asked = int((targets[2 * row] < 0).long().argmin())
            assert ids[2 * row, : asked + 1].equal(ids[2 * row + 1, : asked + 1])
        found = sums(model, ids[::2], targets[::2])
        with torch.no_grad():
            ratios = found - sums(reference, ids[::2], targets[::2])
            moved = [sums(x, ids[1::2], targets[1::2]) for x in (model, reference)]
            kl = (moved[0] - moved[1]).mean().clamp(min=0)
        ratio = found - (found - ratios).detach()
        good = options.desirable_weight * (1 - torch.sigmoid(options.beta * (ratio - kl)))
        wrong = options.undesirable_weight * (1 - torch.sigmoid(options.beta * (kl - ratio)))
        rewards, values = options.beta * ratio.detach(), {"kl": kl.item()}
        for name, side in (("chosen", ~bad), ("rejected", bad)):
            if side.any():
                values[f"rewards/{name}"] = rewards[side].mean().item()
                values[f"logps/{name}"] = found[side].mean().item()
        if bad.any() and not bad.all():
            values["rewards/margins"] = values["rewards/chosen"] - values["rewards/rejected"]
        return torch.where(bad, wrong, good).mean(), values

    gradients, losses, logged = [], [], []
    for step in (1, 2, 3):
        adam.zero_grad()
        with everywhere_float64():
            loss, values = kto("train", step)
            loss.backward()
        gradients.append(whole({name: p.grad for name, p in named.items()}))
        losses.append(loss.item())
        logged.append(values)
        set_rate(adam, section, step)
        adam.step()
    model.eval()
    with everywhere_float64(), torch.no_grad():
        val, val_values = kto("val", 0)
    return Answer(whole(named), gradients, losses), logged, val.item(), val_values


@pytest.fixture(scope="module")
def answers(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kto")
    model = {**MODELS["llama"], "vocab_size": 300, "num_hidden_layers": 4}
    ranks(1).run(save_model, model, str(folder / "model"))
    overrides = [*RUN, *data_keys(folder), f"model.hf={folder / 'model'}"]
    return overrides, ranks(1).run(of_formula, overrides)[0]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=() if i < 3 else pytest.mark.full) for i, x in enumerate(LAYOUTS)],
)
def test_three_steps_are_those_of_the_formula(ranks, answers, layout):
    overrides, (truth, logged, val, val_values) = answers
    size, changes = LAYOUTS[layout]
    found = ranks(size).run(preferred, [*overrides, *changes])
    expect_answers([mine for mine, *_ in found], truth)
    for _, mine_logged, mine_val, mine_values in found:
        assert mine_val == pytest.approx(val, rel=1e-9)
        for own, expected in zip([*mine_logged, mine_values], [*logged, val_values], strict=True):
            assert own == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert logged[0]["kl"] == 0 and max(x["kl"] for x in [*logged, val_values]) > 1e-3


@pytest.mark.full
@pytest.mark.parametrize("layout", ["data2", "pipe2xtensor2", "data2-zero2"])
def test_adapters_are_their_own_reference(ranks, answers, layout):
    overrides = [*answers[0], ADAPTERS]
    ((truth, logged, val, _),) = ranks(1).run(preferred, overrides)
    size, changes = {**LAYOUTS, "data2": (2, ["parallel.data=2"])}[layout]
    found = ranks(size).run(preferred, [*overrides, *changes])
    parity.expect_close([mine.weights for mine, *_ in found], [truth.weights])
    for mine, mine_logged, mine_val, _ in found:
        assert [*mine.losses, mine_val] == pytest.approx([*truth.losses, val], rel=1e-9)
        assert mine_logged[2] == pytest.approx(logged[2], rel=1e-9)


def test_wrong_lines_and_keys_are_named(tdp, tmp_path):
    lines = [{"prompt": "a", "completion": "b", "label": 1}, {"prompt": 3, "completion": ""}]
    lines += [answer(0), {"prompt": "a", "chosen": "b", "rejected": "c"}]
    keys = data_keys(tmp_path)
    path = save_lines(tmp_path / "bad.jsonl", lines)
    (tmp_path / "run.yaml").write_text(f"run: {{dir: {tmp_path}/runs}}\n")
    words = ["train", str(tmp_path / "run.yaml"), *RUN, *keys[1:], f"data.path={path}"]
    code, said = tdp(words)
    said = re.sub(r"\s+", " ", said)
    assert code == 2
    for expected in (
        "bad.jsonl:1: label is '1'; write true",
        "bad.jsonl:2: no key 'label'; there are prompt, completion; prompt is a int; it has to",
        "completion is empty",
        "bad.jsonl:4: no key 'completion'",
    ):
        assert expected in said, said
    for change, expected in {
        "train.dpo={loss: sigmoid}": "loss=sigmoid is not for data.name=unpaired_preference",
        "data.name=preference": "loss=kto is not for data.name=preference",
        "data.global_batch=1": "global_batch=1 leaves kto no other answer",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(expected)):
            parity.config([*RUN, "data.seq_len=24", *keys, "pipeline.microbatches=1", change])
