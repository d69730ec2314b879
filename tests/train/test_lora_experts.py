"""Adapters on stacked experts train, merge and go on as those of peft's `target_parameters`."""

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
    of_peft_experts,
    option_steps,
    quiet,
    save_after,
    saved_by_peft,
)
from tests.train.test_transformers import asked
from tests.train.transformers_ranks import VOCAB, expect_answers, save_model
from torchdistpackage.cli.main import main
from torchdistpackage.models.lora_layout import ADAPTER_FILES

RANKS_IMPORT = ("peft", "tests.models.coverage_ranks")
FULL = (pytest.mark.full,)
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
MODELS = {
    "qwen3_moe": ([*BOTH, "q_proj"], {}),
    "qwen3_moe, five": (BOTH, {"num_experts": 5}),
    "mixtral": (["0.mlp.experts.down_proj", "experts.gate_up_proj", "v_proj"], {}),
    "deepseek_v3": ([*BOTH, "o_proj"], {}),
    "glm4_moe, rslora": (["mlp.experts.gate_up_proj"], {}),
    "gpt_oss": ([*BOTH, "o_proj"], {}),
}
"""By name: targets, and changed settings of the small copy."""
LAYOUTS = {
    "data2": {"data": 2},
    "data2-zero3": {"data": 2, "zero": 3},
    "pipe2": {"pipe": 2},
    "tensor2": {"tensor": 2},
    "expert2": {"data": 2, "expert": 2},
    "expert2-zero3": {"data": 2, "expert": 2, "zero": 3},
    "data4-expert2": {"data": 4, "expert": 2, "zero": 1},
    "expert4": {"data": 4, "expert": 4},
    "expert2xpipe2": {"data": 2, "expert": 2, "pipe": 2},
    "expert2xtensor2": {"data": 2, "expert": 2, "tensor": 2},
}


ROUND = ("qwen3_moe", "expert2")


def run_of(name: str, layout: str) -> tuple[int, list[str]]:
    size, changes = asked(LAYOUTS[layout])
    return size, [*changes, f"parallel.expert={LAYOUTS[layout].get('expert', 1)}"]


def changes_of(name: str, **more: object) -> list[str]:
    section = {"r": 3, "alpha": 6, "target": MODELS[name][0], "use_rslora": "rs" in name, **more}
    return [f"model.lora={json.dumps(section)}"]


def options_of(name: str) -> dict:
    """The same as peft's."""
    targets = MODELS[name][0]
    return {
        "r": 3,
        "lora_alpha": 6,
        "use_rslora": "rs" in name,
        "target_modules": [x for x in targets if "experts.d" not in x and "experts.g" not in x],
        "target_parameters": [x for x in targets if ".experts." in f".{x}"],
    }


@pytest.fixture(scope="session")
def adapted(ranks, tmp_path_factory):
    """(folder, what peft makes of it in one process) by name, made once."""
    made: dict[str, tuple[str, tuple]] = {}

    def of(name: str) -> tuple[str, tuple]:
        if name not in made:
            folder = str(tmp_path_factory.mktemp("lora") / "model")
            small = settings(name.split(",")[0], vocab_size=VOCAB, pad_token_id=None)
            # routers keep their weights in float32, whatever the folder has
            ranks(1).run(save_model, small | MODELS[name][1], folder, "float32")
            initial = parity.whole(
                ranks(1).run(initial_of, [f"model.hf={folder}", *changes_of(name)])
            )
            (truth,) = ranks(1).run(of_peft_experts, folder, initial, options_of(name))
            made[name] = folder, truth
        return made[name]

    return of


def cases():
    small = {("gpt_oss", "expert2-zero3")}
    for name in MODELS:
        for layout in LAYOUTS:
            if name == "gpt_oss" and layout == "expert2xtensor2":
                continue  # refused by name
            yield pytest.param(name, layout, marks=() if (name, layout) in small else FULL)


@pytest.mark.parametrize(("name", "layout"), list(cases()))
def test_three_steps_are_those_of_peft(ranks, adapted, name, layout):
    """Whatever the degree of `expert`: gradients are of all tokens, whichever rank has them."""
    folder, truth = adapted(name)
    size, changes = run_of(name, layout)
    found = ranks(size).run(option_steps, [f"model.hf={folder}", *changes_of(name), *changes])
    expect_answers(found, truth)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) == ROUND else FULL)
        for name in MODELS
        for layout in ("expert2", "tensor2")
    ],
)
def test_folders_go_to_peft_and_back(ranks, adapted, tmp_path, name, layout):
    """peft loads ours without a warning and merges the same bits, and we go on from peft's."""
    folder, _ = adapted(name)
    run, out, merged, again = (str(tmp_path / x) for x in ("run", "out", "merged", "again"))
    (tmp_path / "run").mkdir()
    size, changes = run_of(name, layout)
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
    held, of_ours = (load_file(f"{x}/{ADAPTER_FILES.weights}") for x in (again, out))
    assert held.keys() == of_ours.keys()
    # ours have the type of the run, and peft loads them in that of the folder
    assert all(torch.equal(of_ours[key].to(x), x) for key, x in held.items())
    go_on = [f"model.hf={folder}", *changes_of(name, adapter=again)]
    alone = parity.whole(ranks(1).run(initial_of, go_on))
    begun = parity.whole(ranks(size).run(initial_of, [*go_on, *changes]))
    assert alone.keys() == begun.keys()
    assert all(torch.equal(begun[key], x) for key, x in alone.items())
    adapters = [key for key in begun if ".lora_" in key]
    assert len(adapters) == len(held) and all(begun[key].any() for key in adapters)


@pytest.mark.parametrize(
    ("name", "section", "text"),
    [
        ("mixtral", {"target": ["down_proj"]}, "down_proj of mixtral experts.down_proj"),
        (
            "mixtral",
            {"target": ["experts.down_proj"], "dropout": 0.1},
            "no dropout on the experts of experts.down_proj dropout to 0",
        ),
        pytest.param(
            "gpt_oss",
            {"target": ["experts.down_proj"], "compile": "blocks"},
            "blocks that become one graph experts.down_proj compile to off",
            marks=FULL,  # how tensor ranks share it is tried
        ),
        (
            "mixtral",
            {"target": ["experts.down_proj"], "use_dora": True},
            "use_dora is for linear layers, and experts.down_proj is",
        ),
        (
            "mixtral",
            {"target": ["experts.down_proj"], "modules_to_save": ["mlp.experts"]},
            "experts.down_proj is in modules_to_save too",
        ),
    ],
)
def test_what_peft_has_not_is_refused_before_ranks_start(tmp_path, name, section, text):
    (tmp_path / "config.json").write_text(json.dumps(settings(name)))
    lora = {key: value for key, value in section.items() if key != "compile"}
    overrides = [f"model.hf={tmp_path}", f"model.lora={json.dumps(lora)}"]
    if "compile" in section:
        overrides += [f"train.compile={section['compile']}", "parallel.tensor=2"]
    said = refusal(overrides, 2 if "compile" in section else 1)
    assert tells(said, *text.split())
