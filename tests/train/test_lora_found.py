"""Adapters on classes of transformers without a table here train, and merge, as peft's do."""

import pytest
import torch
from safetensors.torch import load_file

from tests.models.coverage import settings
from tests.train import parity
from tests.train.lora_ranks import (
    initial_of,
    lora_steps,
    merged_by_peft,
    of_peft,
    quiet,
    save_after,
)
from tests.train.test_transformers import asked
from tests.train.transformers_ranks import VOCAB, save_model
from torchdistpackage.cli.main import main

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


@pytest.mark.parametrize(("family", "layout"), list(cases()))
def test_three_steps_are_those_of_peft(ranks, adapted, family, layout):
    folder, truth = adapted(family)
    size, changes = asked(LAYOUTS[layout])
    found = ranks(size).run(lora_steps, [f"model.hf={folder}", lora(family), *changes])
    for step, expected in enumerate(truth.gradients):
        parity.expect_close([mine.gradients[step] for mine in found], [expected])
    parity.expect_close([mine.weights for mine in found], [truth.weights])
    for mine in found:
        assert mine.losses == pytest.approx(truth.losses, rel=1e-9)


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
