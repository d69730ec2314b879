"""Adapters on classes of transformers without a table here train, and merge, as peft's do."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.coverage import settings
from tests.tells import tells
from tests.train import parity
from tests.train.lora_ranks import (
    exported_logits,
    initial_of,
    lora_steps,
    merged_by_peft,
    of_peft,
    quiet,
    save_after,
)
from tests.train.test_transformers import asked
from tests.train.transformers_ranks import VOCAB, expect_answers, save_model
from torchdistpackage.cli.main import main
from torchdistpackage.config.model_section import is_adapter
from torchdistpackage.models.lora_layout import Lora, peft_name
from torchdistpackage.models.transformers_layout import shape_of_section, weights
from torchdistpackage.models.transformers_spec import TransformersSpec

RANKS_IMPORT = ("peft", "tests.models.coverage_ranks")
TARGETS = {
    "phi3": ["qkv_proj", "gate_up_proj", "down_proj"],
    "olmo2": ["q_proj", "o_proj", "up_proj"],
    "gemma3_text": ["all-linear"],
    "granite": ["k_proj", "v_proj", "down_proj"],
    "glm4": ["q_proj", "gate_up_proj"],
    "qwen3_moe": ["q_proj", "o_proj"],
}
LAYOUTS = {
    "tensor2": {"tensor": 2},
    "pipe2": {"pipe": 2},
    "data2": {"data": 2},
    "data2-zero3": {"data": 2, "zero": 3},
    "pipe2xtensor2": {"pipe": 2, "tensor": 2},
}


def lora(family: str) -> str:
    return f"model.lora={{r: 3, alpha: 6, target: [{', '.join(TARGETS[family])}]}}"


@pytest.fixture(scope="session")
def adapted(ranks, tmp_path_factory):
    """(folder, what peft makes of it in one process) by family, made once."""
    made: dict[str, tuple[str, tuple]] = {}

    def of(family: str) -> tuple[str, tuple]:
        if family not in made:
            folder = str(tmp_path_factory.mktemp("lora") / "model")
            small = settings(family, vocab_size=VOCAB, pad_token_id=None)
            ranks(1).run(save_model, small, folder)
            held = ranks(1).run(initial_of, [f"model.hf={folder}", lora(family)])
            target = TARGETS[family]
            options = {
                "r": 3,
                "lora_alpha": 6,
                "target_modules": target if target != ["all-linear"] else "all-linear",
            }
            made[family] = folder, ranks(1).run(of_peft, folder, parity.whole(held), options)[0]
        return made[family]

    return of


def cases():
    small = {("phi3", "pipe2xtensor2")}
    for family in TARGETS:
        for layout in LAYOUTS:
            marks = () if (family, layout) in small else (pytest.mark.full,)
            yield pytest.param(family, layout, marks=marks)


@pytest.mark.full
@pytest.mark.parametrize(("family", "layout"), list(cases()))
def test_three_steps_are_those_of_peft(ranks, adapted, family, layout):
    folder, truth = adapted(family)
    size, changes = asked(LAYOUTS[layout])
    found = ranks(size).run(lora_steps, [f"model.hf={folder}", lora(family), *changes])
    expect_answers(found, truth)


@pytest.mark.full
@pytest.mark.parametrize(
    "family",
    [x if x == "phi3" else pytest.param(x, marks=pytest.mark.full) for x in TARGETS],
)
def test_merged_adapters_are_the_bits_of_peft(ranks, adapted, tmp_path, family):
    """Of a run whose ranks had parts of them."""
    folder, _ = adapted(family)
    size, changes = asked(LAYOUTS["tensor2"])
    ranks(size).run(save_after, [f"model.hf={folder}", lora(family), *changes], str(tmp_path), 2)
    with quiet():
        assert main(["export", str(tmp_path), str(tmp_path / "apart")]) == 0
        assert main(["export", str(tmp_path), str(tmp_path / "merged"), "--merge"]) == 0
    (truth,) = ranks(1).run(merged_by_peft, folder, str(tmp_path / "apart"), str(tmp_path / "of"))
    found, before = (load_file(f"{x}/model.safetensors") for x in (tmp_path / "merged", folder))
    expected = load_file(f"{truth}/model.safetensors")
    assert found.keys() == expected.keys() == before.keys()
    assert all(torch.equal(found[key], x) for key, x in expected.items())
    assert sum(not torch.equal(x, found[key]) for key, x in before.items()) >= 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("mixtral", "all-linear"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("qwen2_moe", "all-linear"),
                ("qwen2_moe", "shared_expert.gate_proj"),
                ("qwen3_moe", "2.self_attn.q_proj"),
                ("llama", "1.mlp.down_proj, q_proj"),
            )
        ),
    ],
)
def test_peft_finds_the_adapters_that_were_trained_and_no_others(ranks, tmp_path, family, target):
    """Of mixtures, where all-linear is more to peft than the layers that are linear."""
    folder, out = str(tmp_path / "model"), str(tmp_path / "out")
    small = settings(family, vocab_size=VOCAB, pad_token_id=None)
    ranks(1).run(save_model, small, folder)
    lora = f"model.lora={{r: 2, alpha: 4, dropout: 0.1, target: [{target}]}}"
    ranks(1).run(save_after, [f"model.hf={folder}", lora], str(tmp_path), 2)
    assert main(["export", str(tmp_path), out]) == 0
    ((expected, found, names),) = ranks(1).run(exported_logits, folder, out)
    assert names == load_file(f"{out}/adapter_model.safetensors").keys()
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert "all-linear" not in (tmp_path / "out" / "adapter_config.json").read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("deepseek_v3", "all-linear"),
        ("deepseek_v3", "shared_experts.gate_proj, down_proj"),
        ("deepseek_v2", "all-linear"),
        ("glm4_moe", "all-linear"),
    ],
)
def test_peft_finds_adapters_on_dense_and_shared_mlps_of_mixtures(tmp_path, family, target):
    """Whose layers peft takes for experts, by their names."""
    small = settings(family, vocab_size=VOCAB, pad_token_id=None)
    save_model(small, str(tmp_path))
    lora = Lora(r=2, alpha=4.0, dropout=0.0, target=tuple(target.split(", ")))
    shape = replace(shape_of_section({"hf": str(tmp_path)}, 8, False), lora=lora)
    parameters, draw = weights(shape), torch.Generator().manual_seed(0)
    adapters = {
        peft_name(name): torch.randn(weight.layout.shape, generator=draw)
        for name, weight in parameters.items()
        if is_adapter(name)
    }
    config = lora.adapter_config(str(tmp_path), parameters)
    (out := tmp_path / "out").mkdir()
    (out / "adapter_config.json").write_text(json.dumps(config))
    save_file(adapters, out / "adapter_model.safetensors")
    expected, found, names = exported_logits(str(tmp_path), str(out))
    assert names == adapters.keys() and any(".mlp." in name for name in names)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_plan_says_what_all_linear_leaves_out(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(settings("mixtral")))
    lora = Lora(r=2, alpha=4.0, dropout=0.0, target=("all-linear",))
    shape = shape_of_section({"hf": str(tmp_path)}, 8, False)
    (said,) = TransformersSpec(replace(shape, lora=lora)).notes()
    assert tells(said, "16 layers", "k_proj", "v_proj", "o_proj")
    assert "12 matrices, 93% of the weights of all, are not linear layers that peft adapts" in said
    assert "model.layers.*.mlp.experts.gate_up_proj" in said
    assert TransformersSpec(shape).notes() == ()
