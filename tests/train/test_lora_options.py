"""Options of `model.lora` beside r, alpha and dropout train, merge and load as peft's do."""

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
    merged_by_peft,
    of_peft_options,
    option_steps,
    quiet,
    save_after,
    saved_by_peft,
)
from tests.train.test_transformers import LAYOUTS as EVERY
from tests.train.test_transformers import MODELS, asked
from tests.train.transformers_ranks import VOCAB, expect_answers, save_model
from torchdistpackage.cli.main import main
from torchdistpackage.families.table import Weight
from torchdistpackage.layout.layout import Layout
from torchdistpackage.models.lora_layout import ADAPTER_FILES, Lora, target_problems

RANKS_IMPORT = ("peft",)
FULL = (pytest.mark.full,)
BOTH = "pipe2xtensor2"
LAYOUTS = {**EVERY, "data2xpipe2-zero1": {"data": 2, "pipe": 2, "zero": 1}}
OPTIONS = {
    "dora, modules": (
        "llama",
        {
            "target": ["q_proj", "k_proj", "down_proj"],
            "use_dora": True,
            "modules_to_save": ["lm_head", "model.norm"],
        },
        {},
    ),
    "dora, biases": ("opt", {"target": ["q_proj", "out_proj", "fc1", "fc2"], "use_dora": True}, {}),
    "dora, conv": (
        "gpt2",
        {"target": ["c_attn", "c_proj"], "use_dora": True},
        {"fan_in_fan_out": True},
    ),
    "embedding": ("llama", {"target": ["embed_tokens", "q_proj", "lm_head"]}, {}),
    "embedding, found": ("olmo2", {"target": ["embed_tokens", "v_proj"], "use_rslora": True}, {}),
    "modules, tied": (
        "llama, tied",
        {"target": ["v_proj"], "modules_to_save": ["embed_tokens"]},
        {"ensure_weight_tying": True},
    ),
    "modules, found": (
        "gemma3_text",
        {"target": ["v_proj"], "modules_to_save": ["embed_tokens"]},
        {"ensure_weight_tying": True},
    ),
    "modules, blocks": (
        "qwen3",
        {"target": ["o_proj"], "modules_to_save": ["1.mlp", "input_layernorm", "embed_tokens"]},
        {},
    ),
}
"""By name: the model, the section model.lora, and settings of peft beside those of the same
names."""


def changes_of(name: str, **more: object) -> list[str]:
    return [f"model.lora={json.dumps({'r': 3, 'alpha': 6, **OPTIONS[name][1], **more})}"]


def options_of(name: str) -> dict:
    """The same as peft's."""
    _, section, more = OPTIONS[name]
    section = dict(section)
    return {"r": 3, "lora_alpha": 6, "target_modules": section.pop("target"), **section, **more}


@pytest.fixture(scope="session")
def adapted(ranks, tmp_path_factory):
    """(folder, what peft makes of it in one process) by name, made once."""
    made: dict[str, tuple[str, tuple]] = {}

    def of(name: str) -> tuple[str, tuple]:
        if name not in made:
            folder = str(tmp_path_factory.mktemp("lora") / "model")
            model = OPTIONS[name][0]
            small = MODELS.get(model) or settings(model, vocab_size=VOCAB, pad_token_id=None)
            ranks(1).run(save_model, small, folder)
            initial = parity.whole(
                ranks(1).run(initial_of, [f"model.hf={folder}", *changes_of(name)])
            )
            (truth,) = ranks(1).run(of_peft_options, folder, initial, options_of(name))
            made[name] = folder, truth
        return made[name]

    return of


def cases():
    small = {("dora, modules", BOTH)}
    for name in OPTIONS:
        for layout in LAYOUTS:
            if name.endswith("found") and LAYOUTS[layout].get("sequence") == 2:
                continue  # refused: only families with a table overlap
            yield pytest.param(name, layout, marks=() if (name, layout) in small else FULL)


@pytest.mark.parametrize(("name", "layout"), list(cases()))
def test_three_steps_are_those_of_peft(ranks, adapted, name, layout):
    folder, truth = adapted(name)
    size, changes = asked(LAYOUTS[layout])
    found = ranks(size).run(option_steps, [f"model.hf={folder}", *changes_of(name), *changes])
    expect_answers(found, truth)


@pytest.mark.parametrize("layout", [pytest.param(x, marks=FULL) for x in (BOTH, "data2-zero3")])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_folders_go_to_peft_and_back(ranks, adapted, tmp_path, name, layout):
    """peft loads ours without a warning and merges the same bits, and we go on from peft's."""
    folder, _ = adapted(name)
    run, out, merged, again = (str(tmp_path / x) for x in ("run", "out", "merged", "again"))
    (tmp_path / "run").mkdir()
    size, changes = asked(LAYOUTS[layout])
    ranks(size).run(save_after, [f"model.hf={folder}", *changes_of(name), *changes], run, 2)
    with quiet():
        assert main(["export", run, out]) == 0
        assert main(["export", run, merged, "--merge"]) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (truth,) = ranks(1).run(merged_by_peft, folder, out, str(tmp_path / "of"))
    expected, ours = (load_file(f"{x}/model.safetensors") for x in (truth, merged))
    before = load_file(f"{folder}/model.safetensors")
    assert ours.keys() == expected.keys() == before.keys()
    assert all(torch.equal(ours[key], x) for key, x in expected.items())
    assert sum(not torch.equal(x, ours[key]) for key, x in before.items()) >= 2
    ranks(1).run(saved_by_peft, folder, out, again)
    overrides = [f"model.hf={folder}", *changes_of(name, adapter=again), *changes]
    begun = parity.whole(ranks(size).run(initial_of, overrides))
    held, of_ours = (load_file(f"{x}/{ADAPTER_FILES.weights}") for x in (again, out))
    assert held.keys() == of_ours.keys()
    for key, x in held.items():
        assert torch.equal(of_ours[key], x)
        global_name = key.removeprefix("base_model.model.")
        assert global_name not in begun or torch.equal(begun[global_name], x)


@pytest.mark.parametrize(
    ("name", "section", "text"),
    [
        (
            "llama",
            {"target": ["q_proj"], "modules_to_save": ["score"]},
            "llama has no module score its modules embed_tokens q_proj",
        ),
        (
            "llama, tied",
            {"target": ["q_proj"], "modules_to_save": ["lm_head"]},
            "lm_head of llama is its embedding name embed_tokens",
        ),
        pytest.param(
            "mamba2",
            {"target": ["out_proj"]},
            "peft puts no adapter on backbone.layers.0.mixer.out_proj name other layers in_proj",
            marks=FULL,  # its class is tried
        ),
        (
            "llama, tied",
            {"target": ["embed_tokens"]},
            "embed_tokens of llama is lm_head.weight too name it in modules_to_save",
        ),
        (
            "llama",
            {"target": ["embed_tokens"], "use_dora": True},
            "use_dora is for linear layers, and embed_tokens is an embedding",
        ),
        (
            "llama",
            {"target": ["q_proj"], "modules_to_save": ["self_attn"]},
            "q_proj is in modules_to_save too name it in one",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_ranks_start(tmp_path, name, section, text):
    (tmp_path / "config.json").write_text(json.dumps(MODELS.get(name) or settings(name)))
    said = refusal([f"model.hf={tmp_path}", f"model.lora={json.dumps(section)}"], 1)
    assert tells(said, *text.split())


@pytest.mark.parametrize("target", ["all-linear", "out_proj"])
def test_what_peft_refuses_of_recurrences_is_refused_before_it(target):
    lora = Lora(r=2, alpha=4.0, dropout=0.0, target=(target,))
    layers = ("layers.0.mixer.in_proj", "layers.0.mixer.out_proj")
    weights = {
        f"{x}.weight": Weight(Layout(f"{x}.weight", (4, 4)), "ones", inputs=1) for x in layers
    }
    weights |= lora.adapters(weights)
    (text,) = target_problems(lora, "nemotron_h", weights, {})
    assert tells(text, "no adapter on layers.0.mixer.out_proj of nemotron_h", "name", "in_proj")
    assert target_problems(lora, "llama", weights, {}) == []
