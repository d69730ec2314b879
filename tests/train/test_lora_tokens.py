"""Tokens beyond those of a folder: its tables grow, and their rows train as peft's do."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

from tests.models.coverage import settings
from tests.models.coverage_ranks import refusal
from tests.tells import tells
from tests.train import parity
from tests.train.lora_ranks import (
    initial_of,
    merged_with_tokens,
    of_peft_tokens,
    option_steps,
    quiet,
    save_after,
)
from tests.train.test_transformers import MODELS, asked
from tests.train.transformers_ranks import VOCAB, expect_answers, save_model, three_steps
from torchdistpackage.cli.main import main
from torchdistpackage.models.lora_layout import ADAPTER_FILES

RANKS_IMPORT = ("peft",)
FULL = (pytest.mark.full,)
STORED = VOCAB - 5
IDS = [3, *range(STORED, VOCAB)]
LAYOUTS = {
    "data2": {"data": 2},
    "data2-zero3": {"data": 2, "zero": 3},
    "pipe2": {"pipe": 2},
    "tensor2": {"tensor": 2},
    "pipe2xtensor2": {"pipe": 2, "tensor": 2},
    "context2": {"context": 2},
    "tensor2-sequence": {"tensor": 2, "sequence": 1},
}
ROWS = {"trainable_token_indices": IDS}
KINDS = {
    "rows": ("llama", ROWS, {}),
    "rows, tied": ("llama, tied", ROWS, {}),
    "rows, scaled": ("gemma3_text", ROWS, {}),
    "rows, found": ("olmo2", ROWS, {}),
    "modules": ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}, {}),
    "modules, tied": (
        "llama, tied",
        {"modules_to_save": ["embed_tokens"]},
        {"ensure_weight_tying": True},
    ),
    "rows, head whole": ("llama", {**ROWS, "modules_to_save": ["lm_head"]}, {}),
}
"""By name: the model, the section model.lora, and settings of peft beside those of the same
names."""


def changes_of(kind: str, **more: object) -> list[str]:
    section = {"r": 3, "alpha": 6, "target": ["q_proj", "v_proj"], **KINDS[kind][1], **more}
    return [f"model.vocab={VOCAB}", f"model.lora={json.dumps(section)}"]


def options_of(kind: str) -> dict:
    """The same as peft's."""
    _, section, more = KINDS[kind]
    section = dict(section)
    if ids := section.pop("trainable_token_indices", None):
        section["trainable_token_indices"] = dict.fromkeys(
            ["embed_tokens"]
            if "tied" in kind or "head" in kind or "scaled" in kind
            else ["embed_tokens", "lm_head"],
            ids,
        )
    return {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], **section, **more}


def small_of(kind: str) -> dict:
    model = KINDS[kind][0]
    small = MODELS.get(model) or settings(model, pad_token_id=None)
    return small | {"vocab_size": STORED}


@pytest.fixture(scope="session")
def grown(ranks, tmp_path_factory):
    """(folder, what peft makes of it in one process) by kind, made once."""
    made: dict[str, tuple[str, tuple]] = {}

    def of(kind: str) -> tuple[str, tuple]:
        if kind not in made:
            folder = str(tmp_path_factory.mktemp("tokens") / "model")
            ranks(1).run(save_model, small_of(kind), folder)
            held = ranks(1).run(initial_of, [f"model.hf={folder}", *changes_of(kind)])
            initial = parity.whole(held)
            table = load_file(f"{folder}/model.safetensors")["model.embed_tokens.weight"]
            mean = initial["model.embed_tokens.weight"][STORED:] - table.mean(0)
            assert mean.abs().max() < 1e-12
            args = (folder, initial, options_of(kind), VOCAB)
            (truth,) = ranks(1).run(of_peft_tokens, *args)
            made[kind] = folder, truth
        return made[kind]

    return of


def cases():
    small = {("rows, tied", "pipe2xtensor2")}
    for kind in KINDS:
        for layout in LAYOUTS:
            yield pytest.param(kind, layout, marks=() if (kind, layout) in small else FULL)


@pytest.mark.parametrize(("kind", "layout"), list(cases()))
def test_three_steps_are_those_of_peft(ranks, grown, kind, layout):
    folder, truth = grown(kind)
    size, changes = asked(LAYOUTS[layout])
    found = ranks(size).run(option_steps, [f"model.hf={folder}", *changes_of(kind), *changes])
    expect_answers(found, truth)


@pytest.mark.parametrize("layout", [pytest.param("pipe2xtensor2", marks=FULL)])
@pytest.mark.parametrize("kind", list(KINDS))
def test_folders_go_to_peft_and_back(ranks, grown, tmp_path, kind, layout):
    """peft loads ours into the resized model without a warning and merges the same bits."""
    folder, _ = grown(kind)
    run, out, merged = (str(tmp_path / x) for x in ("run", "out", "merged"))
    (tmp_path / "run").mkdir()
    size, changes = asked(LAYOUTS[layout])
    ranks(size).run(save_after, [f"model.hf={folder}", *changes_of(kind), *changes], run, 2)
    with quiet():
        assert main(["export", run, out]) == 0
        assert main(["export", run, merged, "--merge"]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (truth,) = ranks(1).run(merged_with_tokens, folder, out, str(tmp_path / "of"), VOCAB)
    expected, ours = (load_file(f"{x}/model.safetensors") for x in (truth, merged))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[key], x) for key, x in expected.items())
    assert ours["model.embed_tokens.weight"].shape[0] == VOCAB
    go_on = [f"model.hf={folder}", *changes_of(kind, adapter=out), *changes]
    begun = parity.whole(ranks(size).run(initial_of, go_on))
    held = load_file(f"{out}/{ADAPTER_FILES.weights}")
    names = {key: key.removeprefix("base_model.model.") for key in held}
    there = {key: name for key, name in names.items() if name in begun}
    assert len(there) >= len(held) - 1  # a tied head has two names in the file
    assert all(torch.equal(begun[name], held[key]) for key, name in there.items())


@pytest.mark.full
@pytest.mark.parametrize("layout", ["data2-zero3", "pipe2xtensor2"])
def test_a_whole_model_with_more_tokens_trains_alike_on_every_layout(ranks, grown, layout):
    overrides = [f"model.hf={grown('rows, tied')[0]}", f"model.vocab={VOCAB}"]
    (truth,) = ranks(1).run(three_steps, overrides)
    size, changes = asked(LAYOUTS[layout])
    expect_answers(ranks(size).run(three_steps, [*overrides, *changes]), truth)


@pytest.mark.parametrize(
    ("vocab", "section", "text"),
    [
        (STORED - 1, {}, "60 remove it or set it to more"),
        (VOCAB, {}, "embed_tokens of llama grows from 60 to 65 rows trainable_token_indices"),
        (VOCAB, {"trainable_token_indices": [62]}, "grows from 60 to 65 rows"),
        (VOCAB, {"trainable_token_indices": [*IDS, 65]}, "token 65 is none of the 65"),
        (VOCAB, {"trainable_token_indices": [*IDS, 3]}, "token 3 is listed twice"),
        (VOCAB, {**ROWS, "target": ["embed_tokens"]}, "embed_tokens has an adapter too"),
        (
            VOCAB,
            {**ROWS, "modules_to_save": ["embed_tokens", "lm_head"]},
            "modules_to_save trains these rows",
        ),
    ],
)
def test_rows_that_cannot_train_are_refused_before_ranks_start(tmp_path, vocab, section, text):
    small = MODELS["llama"] | {"vocab_size": STORED}
    (tmp_path / "config.json").write_text(json.dumps(small))
    lora = {"target": ["q_proj"], **section}
    overrides = [f"model.hf={tmp_path}", f"model.vocab={vocab}"]
    said = refusal([*overrides, f"model.lora={json.dumps(lora)}"], 1)
    assert tells(said, *text.split())
