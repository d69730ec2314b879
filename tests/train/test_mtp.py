"""`model.mtp`: a folder's layer that predicts a further token trains, stays, or is left out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models.coverage import settings
from tests.models.coverage_ranks import refusal
from tests.tells import tells
from tests.train.lora_ranks import quiet, save_after
from tests.train.mtp_ranks import LOSS, of_hand, save_with_mtp
from tests.train.test_transformers import asked
from tests.train.transformers_ranks import VOCAB, expect_answers, three_steps
from torchdistpackage.cli.main import main
from torchdistpackage.config.mtp import COUNT
from torchdistpackage.models.transformers_layout import shape_of_section
from torchdistpackage.models.transformers_spec import TransformersSpec

FULL = (pytest.mark.full,)
LAYOUTS = {
    "alone": {},
    "data2": {"data": 2},
    "data2-zero3": {"data": 2, "zero": 3},
    "tensor2": {"tensor": 2},
    "data2xtensor2-zero1": {"data": 2, "tensor": 2, "zero": 1},
    "expert2-zero3": {"data": 2, "expert": 2, "zero": 3},
}
FAMILIES = ("deepseek_v3", "glm4_moe")


def small_of(family: str) -> dict:
    return settings(family, vocab_size=VOCAB, pad_token_id=None, **{COUNT: 1})


def run_of(layout: str) -> tuple[int, list[str]]:
    size, changes = asked(LAYOUTS[layout])
    return size, [*changes, f"parallel.expert={LAYOUTS[layout].get('expert', 1)}"]


@pytest.fixture(scope="session")
def saved(ranks, tmp_path_factory):
    """(folder, what training by hand makes of it in one process) by family, made once."""
    made: dict[str, tuple[str, tuple]] = {}

    def of(family: str) -> tuple[str, tuple]:
        if family not in made:
            folder = str(tmp_path_factory.mktemp("mtp") / "model")
            ranks(1).run(save_with_mtp, small_of(family), folder)
            made[family] = folder, ranks(1).run(of_hand, folder)[0]
        return made[family]

    return of


def cases():
    for family in FAMILIES:
        for layout in LAYOUTS:
            is_small = (family, layout) == ("deepseek_v3", "data2xtensor2-zero1")
            yield pytest.param(family, layout, marks=() if is_small else FULL)


@pytest.mark.parametrize(("family", "layout"), list(cases()))
def test_three_steps_are_those_by_hand(ranks, saved, family, layout):
    folder, truth = saved(family)
    size, changes = run_of(layout)
    overrides = [f"model.hf={folder}", "model.mtp=train", f"model.mtp_loss={LOSS}", *changes]
    expect_answers(ranks(size).run(three_steps, overrides), truth)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_has_the_trained_layer_in_the_form_of_the_folder(ranks, saved, tmp_path, family):
    folder, _ = saved(family)
    (run := tmp_path / "run").mkdir()
    size, changes = run_of("tensor2")
    overrides = [f"model.hf={folder}", "model.mtp=train", *changes]
    ranks(size).run(save_after, overrides, str(run), 2)
    with quiet():
        assert main(["export", str(run), str(tmp_path / "out")]) == 0
    found, before = (load_file(f"{x}/model.safetensors") for x in (tmp_path / "out", folder))
    assert found.keys() == before.keys()
    assert {key: x.shape for key, x in found.items()} == {k: x.shape for k, x in before.items()}
    written, given = (
        json.loads(Path(x, "config.json").read_text()) for x in (tmp_path / "out", folder)
    )
    assert written["num_hidden_layers"] == given["num_hidden_layers"]
    assert not any("tdp" in key for key in written)
    block = f"model.layers.{given['num_hidden_layers']}."
    assert torch.equal(found[f"{block}embed_tokens.weight"], found["model.embed_tokens.weight"])
    assert torch.equal(found[f"{block}shared_head.head.weight"], found["lm_head.weight"])
    of_layer = [key for key in found if key.startswith(block)]
    still = [key for key in of_layer if torch.equal(found[key].to(before[key]), before[key])]
    # a bias of the router is no parameter, and experts need not have had a token
    assert all("e_score_correction_bias" in key or ".experts." in key for key in still)


@pytest.mark.full
@pytest.mark.parametrize("mtp", ["keep", "leave_out"])
def test_an_export_keeps_or_leaves_out_a_layer_that_does_not_train(ranks, saved, tmp_path, mtp):
    folder, _ = saved("deepseek_v3")
    (run := tmp_path / "run").mkdir()
    size, changes = run_of("tensor2")
    ranks(size).run(save_after, [f"model.hf={folder}", f"model.mtp={mtp}", *changes], str(run), 2)
    with quiet():
        assert main(["export", str(run), str(tmp_path / "out")]) == 0
    found, before = (load_file(f"{x}/model.safetensors") for x in (tmp_path / "out", folder))
    block = (
        f"model.layers.{json.loads(Path(folder, 'config.json').read_text())['num_hidden_layers']}."
    )
    of_layer = {key for key in before if key.startswith(block)}
    assert of_layer and before.keys() - of_layer == {x for x in found if not x.startswith(block)}
    assert of_layer & found.keys() == (of_layer if mtp == "keep" else set())
    for key in of_layer & found.keys():
        assert torch.equal(found[key].to(before[key]), before[key])


def test_a_plan_says_what_becomes_of_the_layer(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small_of("deepseek_v3")))
    for mtp, text in (
        ("keep", "do not train keeps them as the folder has them"),
        ("leave_out", "do not train is without them"),
        ("train", "predicts the token after the next one counts 0.3 times"),
    ):
        section = {"hf": str(tmp_path), "mtp": mtp, "mtp_loss": 0.3}
        spec = TransformersSpec(shape_of_section(section, 8, False))
        (said,) = spec.notes()
        assert tells(said, f"model.mtp={mtp}", *text.split())
        assert spec.config_json("float32", None)[COUNT] == (0 if mtp == "leave_out" else 1)


@pytest.mark.parametrize(
    ("family", "changes", "size", "text"),
    [
        ("llama", [], 1, "train is for deepseek_v3 and glm4_moe, model of type llama"),
        ("deepseek_v3", ["parallel.pipe=2"], 2, "model.mtp=train parallel.pipe"),
        ("deepseek_v3", ["model.lora={target: [o_proj]}"], 1, "model.mtp=train model.lora.target"),
    ],
)
def test_what_cannot_train_is_refused_before_ranks_start(tmp_path, family, changes, size, text):
    (tmp_path / "config.json").write_text(json.dumps(small_of(family)))
    said = refusal([f"model.hf={tmp_path}/config.json", "model.mtp=train", *changes], size)
    assert tells(said, *text.split())


def test_a_second_layer_is_refused_by_its_number(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(small_of("deepseek_v3") | {COUNT: 2}))
    said = refusal([f"model.hf={tmp_path}/config.json", "model.mtp=train"], 1)
    assert tells(said, "num_nextn_predict_layers=2", "keep or leave_out")
