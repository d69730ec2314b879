"""`model.weights` gives the model section the sizes of a transformers folder. No torch."""

import json
import math
from pathlib import Path

import pytest

from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.hugging_face import (
    model_keys,
    read_config,
    tagged,
    with_earlier_rope,
)
from torchdistpackage.config.load import loads
from torchdistpackage.errors import ConfigError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    "max_position_embeddings": 256,
}
SIZES = {
    "layers": 3,
    "dim": 16,
    "heads": 4,
    "kv_heads": 2,
    "mlp_hidden": 24,
    "mlp": "swiglu",
    "norm": "rms",
    "tied": False,
    "attention_bias": False,
    "max_seq_len": 256,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_sizes_come_from_the_folder_and_stay_in_the_resolved_run(folder: Path) -> None:
    run = loads(f"model: {{weights: {folder}}}")
    found = run.model.model_dump()
    assert {key: found[key] for key in SIZES} == SIZES
    assert (run.model.rope.theta, run.model.norm_eps) == (5e5, 1e-6)
    assert loads(run.to_yaml()) == run


def test_what_no_weight_depends_on_may_be_set_otherwise(folder: Path) -> None:
    run = loads(f"model: {{weights: {folder}, norm_eps: 0.1, rope: {{theta: 100}}}}")
    assert (run.model.norm_eps, run.model.rope.theta) == (0.1, 100)


def test_adapters_of_wrong_numbers_are_listed_with_their_lines(folder: Path) -> None:
    lora = ("r: 0", 'alpha: "16"', "dropout: 1", "lora_alpha: 16", "target: q_proj")
    text = "\n".join((f"model:\n  hf: {folder}\n  lora:", *(f"    {x}" for x in lora)))
    with pytest.raises(ConfigErrors) as caught:
        loads(text, "run.yaml")
    assert [(p.line, p.path, p.text) for p in caught.value.problems] == [
        (4, "model.lora.r", "wants a whole number, 1 or more, up to 65,536, got the number 0"),
        (5, "model.lora.alpha", 'wants a number above 0, got the text "16"'),
        (6, "model.lora.dropout", "wants a number, 0 or more, below 1, got the number 1"),
        (7, "model.lora.lora_alpha", "unknown key; did you mean model.lora.alpha?"),
        (
            8,
            "model.lora.target",
            'wants a list of names, e.g. [q_proj, v_proj], or null, got the text "q_proj"',
        ),
    ]


def test_sizes_that_contradict_the_folder_are_listed_with_their_lines(folder: Path) -> None:
    text = f"model:\n  weights: {folder}\n  layers: 2\n  tied: true\n"
    with pytest.raises(ConfigErrors) as caught:
        loads(text, "r.yaml", ["parallel.tensor=3"])
    found = [str(problem) for problem in caught.value.problems]
    why = f"{folder}/config.json has"
    assert f"r.yaml:3: model.layers: the number 2, but {why} the number 3; remove it" in found
    assert f"r.yaml:4: model.tied: true, but {why} false; remove it" in found


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        (
            {"model_type": "mixtral"},
            ["model_type is 'mixtral', but model.weights reads gpt2 and llama"],
        ),
        (
            {
                "hidden_act": "relu",
                "rope_parameters": {"rope_type": "longrope"},
                "quantization_config": {"bits": 4},
            },
            ["hidden_act is 'relu'", "rope_type is 'longrope'; use", "quantization_config is set"],
        ),
        ({"hidden_size": "wide"}, ["model.dim: wants a whole number", 'got the text "wide"']),
        ({"model_type": ["llama"]}, ["model_type is ['llama'], but model.weights reads"]),
        (
            {"model_type": "gpt2", "activation_function": {}},
            ["activation_function is {}; use one of gelu_new"],
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
            ["original_max_position_embeddings: wants a whole number, 1 or more", "the number 0"],
        ),
    ],
)
def test_a_model_that_cannot_be_one_of_ours_is_refused(folder, changes, texts) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    with pytest.raises(ConfigErrors) as caught:
        loads(f"model:\n  weights: {folder}\n", "r.yaml")
    assert all(text in str(caught.value) for text in texts)
    assert "r.yaml:2: " in str(caught.value)


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigErrors, match=r"model.weights: nowhere: there is no such folder"):
        loads("model: {weights: nowhere}")


def test_gpt2_settings_without_a_key_are_refused_together() -> None:
    odd = {
        "model_type": "gpt2",
        "activation_function": "relu",
        "scale_attn_by_inverse_layer_idx": True,
        "scale_attn_weights": False,
    }
    with pytest.raises(ConfigError) as caught:
        model_keys(odd, "here")
    for text in ("activation_function is 'relu'", "inverse_layer_idx is True", "weights is False"):
        assert text in str(caught.value)


THETA = {"rope_theta": 7.0, "rotary_emb_base": 7.0}


@pytest.mark.parametrize(
    ("given", "earlier"),
    [
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            {**THETA, "rope_scaling": None},
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}},
            {**THETA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            {"partial_rotary_factor": 0.5, "rotary_pct": 0.5, "rope_scaling": None},
        ),
        (  # as tdp export writes it
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0},
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_theta": 7.0,
            },
            {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        ({"rope_theta": 7.0}, {"rope_theta": 7.0, "rope_scaling": None}),
    ],
)
def test_rotary_keys_are_also_those_of_before_transformers_5(given, earlier) -> None:
    assert with_earlier_rope(given) == given | earlier


def test_rotary_scalings_of_before_transformers_5_are_read() -> None:
    scaling = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    older = {k: v for k, v in LLAMA.items() if k != "rope_parameters"}
    older |= {"rope_theta": 7.0, "rope_scaling": scaling}
    assert model_keys(older, "here")["rope"] == {
        **scaling,
        "theta": 7.0,
        "original_max_position_embeddings": 256,
    }
    default = model_keys({**older, "rope_scaling": None}, "here")["rope"]
    assert default == {"theta": 7.0, "type": "default"}


def test_numbers_that_json_does_not_have_are_read_and_written_as_transformers_does(tmp_path):
    """At any depth, and as literals of before transformers 5.24."""
    text = (
        '{"model_type": "mamba2", "time_step_limit": [0.0, {"__float__": "Infinity"}], '
        '"inner": {"least": {"__float__": "-Infinity"}, "none": [{"__float__": "NaN"}]}, '
        '"literal": -Infinity, "kept": {"__float__": "3"}}'
    )
    (tmp_path / "config.json").write_text(text)
    found = read_config(tmp_path)
    assert found["time_step_limit"] == [0.0, math.inf] and found["literal"] == -math.inf
    assert found["inner"]["least"] == -math.inf and math.isnan(found["inner"]["none"][0])
    assert found["kept"] == {"__float__": "3"}
    written = json.loads(text)
    written["literal"] = {"__float__": "-Infinity"}
    assert tagged(found) == written
    assert tagged((1.0, math.nan)) == [1.0, {"__float__": "NaN"}]
