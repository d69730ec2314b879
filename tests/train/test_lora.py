"""`model.lora`: adapters under every layout train as transformers and peft in one process."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.models.coverage_ranks import refusal
from tests.tells import tells
from tests.train import parity
from tests.train.lora_ranks import (
    PREFIX,
    initial_of,
    loaded_by_peft,
    lora_steps,
    merged_by_peft,
    of_peft,
    quiet,
    recomputed,
    save_after,
)
from tests.train.test_generate import on_layout
from tests.train.test_transformers import LAYOUTS as EVERY
from tests.train.test_transformers import MODELS, asked, fits
from tests.train.transformers_ranks import expect_answers, save_model, third_step
from torchdistpackage.checkpoint.manifest import read_manifest
from torchdistpackage.cli._inference import source_of
from torchdistpackage.cli.main import main
from torchdistpackage.models.lora_layout import ADAPTER_FILES

RANKS_IMPORT = ("peft",)
FULL = (pytest.mark.full,)
BOTH = "pipe2xtensor2"
LAYOUTS = {**EVERY, "data2xpipe2-zero1": {"data": 2, "pipe": 2, "zero": 1}}
TARGETS = {
    "llama": ["q_proj", "v_proj"],
    "llama, tied": ["k_proj", "v_proj", "o_proj", "down_proj"],
    "mistral": ["all-linear"],
    "qwen2": ["q_proj", "lm_head"],
    "qwen3": ["k_proj", "o_proj"],
    "gemma2": ["all-linear"],
    "gpt_neox": ["query_key_value", "dense"],
    "falcon": ["query_key_value", "dense_4h_to_h"],
    "opt": ["q_proj", "out_proj", "fc2"],
    "bloom": ["all-linear"],
    "gpt2": ["c_attn", "c_proj"],
    "llama, last block": ["2.self_attn.q_proj", "2.mlp.down_proj"],
    "llama, first block": ["0.self_attn.v_proj"],
    "llama, rslora": ["q_proj", "down_proj"],
}


def changes_of(name: str, **more: object) -> list[str]:
    settings = {"r": 3, "alpha": 6, "target": TARGETS[name], **more}
    if name.endswith("rslora"):
        settings["use_rslora"] = True
    return [f"model.lora={json.dumps(settings)}"]


def options_of(name: str) -> dict:
    """The same as peft's."""
    target = TARGETS[name]
    return {
        "r": 3,
        "lora_alpha": 6,
        "target_modules": target if target != ["all-linear"] else "all-linear",
        "fan_in_fan_out": name == "gpt2",
        "use_rslora": name.endswith("rslora"),
    }


@pytest.fixture(scope="session")
def adapted(ranks, tmp_path_factory):
    """(folder, what peft makes of it in one process) by name, made once."""
    made: dict[str, tuple[str, tuple]] = {}

    def of(name: str) -> tuple[str, tuple]:
        if name not in made:
            folder = str(tmp_path_factory.mktemp("lora") / "model")
            ranks(1).run(save_model, MODELS.get(name, MODELS["llama"]), folder)
            held = ranks(1).run(initial_of, [f"model.hf={folder}", *changes_of(name)])
            made[name] = (
                folder,
                ranks(1).run(of_peft, folder, parity.whole(held), options_of(name))[0],
            )
        return made[name]

    return of


def cases():
    small = {("llama", BOTH), ("llama, last block", "pipe2")}
    for name in TARGETS:
        for layout in (x for x in LAYOUTS if fits(name, x)):
            yield pytest.param(name, layout, marks=() if (name, layout) in small else FULL)


@pytest.mark.parametrize(("name", "layout"), list(cases()))
def test_three_steps_are_those_of_peft(ranks, adapted, name, layout):
    folder, truth = adapted(name)
    size, changes = asked(LAYOUTS[layout])
    found = ranks(size).run(lora_steps, [f"model.hf={folder}", *changes_of(name), *changes])
    expect_answers(found, truth)


@pytest.mark.parametrize("layout", [pytest.param(x, marks=FULL) for x in (BOTH, "data2-zero3")])
@pytest.mark.parametrize("name", ["llama, tied", "gpt2"])
def test_adapters_begin_the_same_under_every_layout(ranks, adapted, name, layout):
    overrides = [f"model.hf={adapted(name)[0]}", *changes_of(name)]
    size, changes = asked(LAYOUTS[layout])
    found = parity.whole(ranks(size).run(initial_of, [*overrides, *changes]), rtol=0, atol=0)
    alone = parity.whole(ranks(1).run(initial_of, overrides), rtol=0, atol=0)
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[key], x) for key, x in alone.items())
    a, b = (torch.cat([x.flatten() for n, x in alone.items() if key in n]) for key in ("_A", "_B"))
    assert not b.any() and a.abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        # in the small set test_qlora.py has one, which merges the adapters then
        pytest.param("llama", BOTH, "data2-zero1", marks=FULL),
        pytest.param("gpt2", "data2-zero3", BOTH, marks=FULL),
        pytest.param("llama, last block", "pipe2", "tensor2", marks=FULL),
    ],
)
def test_a_run_goes_on_under_another_layout(ranks, adapted, tmp_path, name, first, then):
    folder, truth = adapted(name)
    overrides = [f"model.hf={folder}", *changes_of(name)]
    size, changes = asked(LAYOUTS[first])
    before = ranks(size).run(save_after, [*overrides, *changes], str(tmp_path), 2)
    size, changes = asked(LAYOUTS[then])
    found = ranks(size).run(third_step, [*overrides, *changes], str(tmp_path))
    parity.expect_close([mine.gradients[0] for mine in found], [truth.gradients[2]])
    parity.expect_close([mine.weights for mine in found], [truth.weights])
    assert [*before[0], *found[0].losses] == pytest.approx(truth.losses, rel=1e-9)


@pytest.mark.parametrize(
    "layout", ["tensor2", *(pytest.param(x, marks=FULL) for x in ("data2-zero3", "pipe2"))]
)
def test_a_run_goes_on_from_the_adapters_of_a_folder(ranks, adapted, tmp_path, layout):
    """Their bits come in on every layout, and the steps and the merged model are peft's."""
    name = "llama, rslora"
    folder, _ = adapted(name)
    run, out, merged = (str(tmp_path / x) for x in ("run", "out", "merged"))
    (tmp_path / "run").mkdir()
    ranks(1).run(save_after, [f"model.hf={folder}", *changes_of(name)], run, 2)
    with quiet():
        assert main(["export", run, out]) == 0
        assert main(["export", run, merged, "--merge"]) == 0
    (truth,) = ranks(1).run(merged_by_peft, folder, out, str(tmp_path / "of"))
    expected = load_file(f"{truth}/model.safetensors")
    assert all(
        torch.equal(load_file(f"{merged}/model.safetensors")[k], expected[k]) for k in expected
    )
    held = load_file(f"{out}/{ADAPTER_FILES.weights}")
    size, changes = asked(LAYOUTS[layout])
    overrides = [f"model.hf={folder}", *changes_of(name, adapter=out), *changes]
    begun = parity.whole(ranks(size).run(initial_of, overrides))
    assert all(torch.equal(begun[key.removeprefix(PREFIX)], x) for key, x in held.items())
    (of_peft_alone,) = ranks(1).run(of_peft, folder, begun, options_of(name))
    found = ranks(size).run(lora_steps, overrides)
    parity.expect_close([mine.weights for mine in found], [of_peft_alone.weights])
    for mine in found:
        assert mine.losses == pytest.approx(of_peft_alone.losses, rel=1e-9)


def test_adapters_with_other_settings_are_refused_before_ranks_start(ranks, adapted, tmp_path):
    name = "llama, rslora"
    folder, _ = adapted(name)
    run, out = str(tmp_path), str(tmp_path / "out")
    ranks(1).run(save_after, [f"model.hf={folder}", *changes_of(name)], run, 1)
    assert main(["export", run, out]) == 0
    other = [f"model.hf={folder}", *changes_of("llama", adapter=out, r=4)]
    said = refusal(other, 1)
    assert tells(said, "r is 3", "4", "use_rslora is True", "v_proj.lora_A.weight is missing")
    assert tells(
        refusal([other[0], *changes_of(name, adapter=str(tmp_path))], 1), "adapter_config.json"
    )


@pytest.mark.parametrize(
    ("name", "layout"),
    [("llama", BOTH)] + [pytest.param(x, BOTH, marks=FULL) for x in ("gpt2", "mistral", "qwen2")],
)
def test_a_run_comes_out_as_a_folder_of_peft(ranks, adapted, tmp_path, name, layout):
    """Bit for bit, there and back; and `tdp generate` writes what peft's model does."""
    folder, _ = adapted(name)
    size, changes = asked(LAYOUTS[layout])
    overrides = [f"model.hf={folder}", *changes_of(name), *changes]
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    ranks(size).run(save_after, overrides, str(run), 2)
    manifest = read_manifest(run / "checkpoints" / "step_000002")
    assert all(".lora_" in key for key in manifest.tensors)
    assert main(["export", str(run), str(out)]) == 0
    assert {x.name for x in out.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    prompt = [5, 9, 2]
    ((loaded, tokens),) = ranks(1).run(loaded_by_peft, folder, str(out), prompt)
    saved, again = (load_file(x / ADAPTER_FILES.weights) for x in (out, tmp_path / "out-again"))
    assert saved.keys() == again.keys() == {f"{PREFIX}{key}" for key in loaded}
    assert loaded.keys() == {key for key in manifest.tensors if "#" not in key}
    for key, x in loaded.items():
        assert torch.equal(saved[PREFIX + key], x) and torch.equal(again[PREFIX + key], x)
        assert x.abs().max() > 0
    told = on_layout(ranks, source_of(run, None), LAYOUTS[layout], prompt=prompt)
    assert told == [tokens] * size


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        pytest.param(BOTH, ["train.recompute=blocks"], marks=FULL),
        ("data2-zero3", ["train.recompute=blocks"]),
        pytest.param("pipe2", ["train.recompute=auto", "train.memory_gb=0.00018"], marks=FULL),
    ],
)
def test_recomputed_blocks_change_nothing(ranks, adapted, layout, changes):
    """With dropout before adapters, whose draws are made again."""
    size, axes = asked(LAYOUTS[layout])
    overrides = [f"model.hf={adapted('llama, first block')[0]}", *axes]
    overrides += ["model.lora={r: 3, target: [all-linear], dropout: 0.3}"]
    plain, again = (ranks(size).run(recomputed, overrides, how) for how in ([], changes))
    assert all(not names for names, _, _ in plain) and all(names for names, _, _ in again)
    assert [losses for *_, losses in plain] == [losses for *_, losses in again]
    one, other = (parity.whole([held for _, held, _ in found]) for found in (plain, again))
    assert all(torch.equal(x, other[name]) for name, x in one.items())
