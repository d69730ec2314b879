"""Folders of weights for `model.hf`: what is read of them, and what is refused. No torch."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.models.test_transformers_layout import LLAMA, folder_of, named, refusal
from tests.tells import tells
from torchdistpackage.config.load import loads
from torchdistpackage.models.transformers_folder import open_folder
from torchdistpackage.models.transformers_layout import global_name, layouts, shape_of_section
from torchdistpackage.models.transformers_spec import TransformersSpec
from torchdistpackage.plan.run_plan import make_plan


def test_a_folder_is_read_when_it_has_the_weights(tmp_path):
    folder_of(tmp_path)
    plan = make_plan(loads("{}", overrides=[f"model.hf={tmp_path}"]), 1)
    assert plan.config.model.initial_folder == str(tmp_path)


NEOX = {"model_type": "gpt_neox", "vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1}


def test_masks_that_older_folders_hold_are_not_read(tmp_path):
    """As the folders of Pythia, whose head has its old name as well."""
    settings = {**NEOX, "num_attention_heads": 2, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    shape = shape_of_section({"hf": str(tmp_path)}, 8, False)
    held = {name: np.zeros(x.shape, np.float32) for name, x in layouts(shape).items()}
    held["embed_out.weight"] = held.pop("lm_head.weight")
    path = "gpt_neox.layers.0.attention"
    masks = {f"{path}.bias": np.ones((1, 1, 8, 8), bool), f"{path}.masked_bias": np.zeros(1)}
    save_file(held | masks, tmp_path / "model.safetensors")
    assert open_folder(tmp_path, shape).places.keys() == layouts(shape).keys()
    # as transformers saves it, and called in its modules before that was renamed
    assert {
        s.key for parts in TransformersSpec(shape).sources().values() for s in parts
    } == held.keys()
    assert global_name(shape, "embed_out.weight") == "lm_head.weight"


def test_a_folder_without_weights_is_refused_but_its_config_is_taken(tmp_path):
    path = named(tmp_path)
    text = refusal(f"model.hf={tmp_path}")
    assert tells(text, "model.safetensors", "model.safetensors.index.json")
    plan = make_plan(loads("{}", overrides=[f"model.hf={path}"]), 1)
    assert plan.config.model.initial_folder is None


def test_tensors_that_are_missing_or_others_are_all_said(tmp_path):
    folder_of(
        tmp_path,
        model__norm__weight=None,
        model__layers__0__self_attn__q_proj__weight=np.zeros((16, 16), np.float32),
        model__norm__bias=np.zeros(16, np.float32),
    )
    text = refusal(f"model.hf={tmp_path}", "parallel.tensor=2")
    assert "2 problems" in text  # with that of the axis
    assert "model.norm.weight is missing" in text
    assert tells(text, "q_proj.weight", "shape (16, 16)", "(24, 16)")
    assert "model.norm.bias is not expected" in text


@pytest.mark.parametrize("block_bytes", [1 << 20, 100])
def test_a_tied_head_that_is_not_the_embedding_is_not_dropped(tmp_path, monkeypatch, block_bytes):
    """transformers keeps both then, and trains another model than the tied one."""
    monkeypatch.setattr("torchdistpackage.bounded._BLOCK_BYTES", block_bytes)
    settings = {**LLAMA, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    shape, hf = shape_of_section({"hf": str(tmp_path)}, 8, False), f"model.hf={tmp_path}"
    held = {name: np.ones(x.shape, np.float32) for name, x in layouts(shape).items()}
    table, index = held["model.embed_tokens.weight"], tmp_path / "model.safetensors.index.json"
    files = {**dict.fromkeys(held, "model.safetensors"), "lm_head.weight": "head.safetensors"}
    save_file(held, tmp_path / "model.safetensors")
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))

    save_file({"lm_head.weight": table}, tmp_path / "head.safetensors")
    assert open_folder(tmp_path, shape).places.keys() == layouts(shape).keys()
    other = table.copy()
    other[-1, -1] = 2
    for head in (other, table.astype(np.float64)):
        save_file({"lm_head.weight": head}, tmp_path / "head.safetensors")
        text = refusal(hf)
        assert tells(
            text,
            "config.json",
            "lm_head.weight",
            "head.safetensors",
            "model.embed_tokens.weight",
            "tie_word_embeddings",
            "config.json",
        )
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "tie_word_embeddings": False}))
        assert make_plan(loads("{}", overrides=[hf]), 1).layouts["lm_head.weight"]
        (tmp_path / "config.json").write_text(json.dumps(settings))


def test_a_shard_that_is_missing_is_refused(tmp_path):
    held = folder_of(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    files = dict.fromkeys(held, "model-00001-of-00002.safetensors")
    files["lm_head.weight"] = "model-00002-of-00002.safetensors"
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    text = refusal(f"model.hf={tmp_path}")
    assert "lacks 1 of 2 files" in text and "model-00002-of-00002.safetensors" in text
