"""Folders of transformers models that cannot be read say all that is wrong. No torch."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from torchdistpackage.errors import CheckpointError, ConfigError, LayoutError
from torchdistpackage.layout.moe import MoEShape
from torchdistpackage.models.gpt_layout import GPTShape, layouts
from torchdistpackage.models.hugging_face_layout import family_of, open_folder, sources

GPT2 = GPTShape(2, 8, 2, 11, 6, position="learned", mlp="gelu_tanh")
LLAMA = GPTShape(
    layers=2,
    dim=8,
    heads=4,
    vocab=11,
    seq_len=6,
    kv_heads=2,
    norm="rms",
    mlp="swiglu",
    mlp_hidden=12,
    attention_bias=False,
    mlp_bias=False,
    tied=False,
)


def arrays(shape: GPTShape) -> dict[str, np.ndarray]:
    of = (source for parts in sources(shape).values() for source in parts)
    return {source.key: np.zeros(source.shape, np.float32) for source in of}


def write(folder: Path, held: dict[str, np.ndarray]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(held, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_every_parameter_is_made_of_tensors(tmp_path, shape):
    whole = layouts(shape)
    made_of = sources(shape)
    assert made_of.keys() == whole.keys()
    for name, parts in made_of.items():
        assert sum(part.num_rows for part in parts) == whole[name].shape[0]
    found = open_folder(write(tmp_path, arrays(shape)), shape)
    assert {file for file, _ in found.places.values()} == {"model.safetensors"}


def test_names_of_older_versions_and_of_models_without_a_head_are_known(tmp_path):
    held = {key.removeprefix("transformer."): x for key, x in arrays(GPT2).items()}
    mask = {"h.0.attn.bias": np.zeros((1, 1), np.float32), "h.1.attn.masked_bias": np.zeros(1)}
    head = {"lm_head.weight": np.zeros((11, 8), np.float32)}
    found = open_folder(write(tmp_path, held | mask | head), GPT2)
    assert found.places["transformer.wte.weight"] == ("model.safetensors", "wte.weight")
    head["lm_head.weight"] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight in model\.safetensors differs"):
        open_folder(write(tmp_path, held | mask | head), GPT2)


def test_all_that_differs_is_listed_at_once(tmp_path):
    held = arrays(LLAMA)
    del held["model.layers.1.mlp.up_proj.weight"]
    held["model.layers.2.input_layernorm.weight"] = np.zeros(8, np.float32)
    held["model.layers.0.self_attn.k_proj.weight"] = np.zeros((8, 8), np.float32)
    held["model.norm.weight"] = np.zeros(8, np.int8)
    with pytest.raises(CheckpointError) as caught:
        open_folder(write(tmp_path, held), LLAMA)
    text = str(caught.value)
    for part in (
        "4 of 21 tensors differ",
        "model.layers.1.mlp.up_proj.weight is missing",
        "model.layers.2.input_layernorm.weight is not expected",
        "self_attn.k_proj.weight has shape (8, 8), where the model has (4, 8)",
        "model.norm.weight is of type I8",
    ):
        assert part in text


def indexed(folder: Path, weight_map: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_a_folder_that_holds_no_weights_says_what_it_has(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        open_folder(tmp_path / "nowhere", GPT2)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"no weights: neither .*pytorch_model.bin would run"):
        open_folder(tmp_path, GPT2)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        open_folder(tmp_path, GPT2)


@pytest.mark.parametrize(
    ("weight_map", "text"),
    [
        ({"a": "../secret.safetensors"}, "names no files of this folder"),
        ({"a": 3}, "names no files of this folder"),
        ({}, "names no files of this folder"),
        ([1], "cannot be read"),
        ({"a": "x.safetensors", "b": "y.safetensors"}, "lacks 2 of 2 files .*: x.safe.*, y.safe"),
    ],
)
def test_an_index_is_not_believed(tmp_path, weight_map, text):
    with pytest.raises(CheckpointError, match=text):
        open_folder(indexed(tmp_path, weight_map), GPT2)


def test_files_of_an_index_hold_what_it_says(tmp_path):
    held = arrays(GPT2)
    names = sorted(held)
    half = len(names) // 2
    parts = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    for file, keys in parts.items():
        save_file({key: held[key] for key in keys}, tmp_path / file)
    places = {key: file for file, keys in parts.items() for key in keys}
    found = open_folder(indexed(tmp_path, places), GPT2)
    assert {key: file for key, (file, _) in found.places.items()} == places
    swapped = places | {names[0]: "b.safetensors"}
    with pytest.raises(CheckpointError, match=f"1 of .*: {names[0]} is missing"):
        open_folder(indexed(tmp_path, swapped), GPT2)


def test_a_shape_that_transformers_does_not_have_is_refused():
    assert (family_of(GPT2), family_of(LLAMA)) == ("gpt2", "llama")
    odd = GPTShape(2, 8, 2, 11, 6, norm="rms")
    text = "for gpt2: norm=layer, position=learned; for llama: mlp=swiglu"
    with pytest.raises(LayoutError, match=text):
        sources(odd)
    mixture = replace(LLAMA, moe=MoEShape(num_experts=4, top_k=2, hidden=8, gated=True))
    with pytest.raises(LayoutError, match="for llama: no moe"):
        sources(mixture)


def test_a_config_that_is_no_model_is_refused(tmp_path):
    from torchdistpackage.config.hugging_face import model_keys, read_config

    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="is not a JSON mapping"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="model_type is 'opt'"):
        model_keys({"model_type": "opt"}, "here")
