"""Stages of transformers' own modules: the parameters that transformers has, in little memory."""

import pytest

from tests.each import each
from tests.models.transformers_model_ranks import (
    different_defaults,
    different_parameters,
    different_under_other_keys,
    frequencies,
    initial_of_transformers,
    memory_of_loading,
    what_is_refused,
)
from tests.tells import tells
from tests.train.test_transformers import MODELS, SMALL
from tests.train.transformers_ranks import save_model
from torchdistpackage.config.packages import OLDEST, is_before
from torchdistpackage.families.registry import FAMILIES
from torchdistpackage.models.transformers_layout import TransformersShape, weights

MORE = {
    "gpt2, untied": {**MODELS["gpt2"], "tie_word_embeddings": False, "n_inner": 20},
    "gemma2, biases": {**MODELS["gemma2"], "attention_bias": True},
    "neox, no biases": {**MODELS["gpt_neox"], "attention_bias": False},
    "falcon, one key head": {**SMALL, "model_type": "falcon"},
    "falcon, one norm": {**MODELS["falcon"], "num_ln_in_parallel_attn": 1},
    "opt, no last norm": {**MODELS["opt"], "do_layer_norm_before": False},
    "opt, no biases": {**MODELS["opt"], "enable_bias": False},
}
ALL = {**MODELS, **MORE}


def test_parameters_are_those_of_transformers(ranks):
    assert {settings["model_type"] for settings in MODELS.values()} == FAMILIES.keys()
    (found,) = ranks(1).run(each, different_parameters, [(x,) for x in ALL.values()])
    assert dict(zip(ALL, found, strict=True)) == {key: {} for key in ALL}


def test_settings_that_are_left_out_have_the_defaults_of_transformers(ranks):
    (found,) = ranks(1).run(each, different_defaults, [(family,) for family in FAMILIES])
    assert dict(zip(FAMILIES, found, strict=True)) == {key: {} for key in FAMILIES}


def test_a_setting_under_its_other_key_is_that_of_transformers(ranks, tmp_path):
    """Published folders of BLOOM say n_embed and num_attention_heads."""
    calls = [(family, str(tmp_path)) for family in FAMILIES]
    (found,) = ranks(1).run(each, different_under_other_keys, calls)
    assert dict(zip(FAMILIES, found, strict=True)) == {key: {} for key in FAMILIES}


def test_rotary_positions_are_read_as_transformers_5_writes_them(ranks):
    """Before 5 it ignores these keys, and reads others, which not all families call the same."""
    rope = {"rope_type": "linear", "rope_theta": 77.0, "factor": 4.0}
    calls = []
    for family in FAMILIES.keys() - {"bloom", "gpt2", "opt"}:
        part = {"partial_rotary_factor": 0.5} if family == "gpt_neox" else {}
        heads = dict.fromkeys(MODELS[family].keys() & {"head_dim"}, 16)
        sizes = {"hidden_size": 64, **heads}
        calls.append(({**MODELS[family], **sizes, "rope_parameters": {**rope, **part}},))
    (found,) = ranks(1).run(each, frequencies, calls)
    for (settings,), made in zip(calls, found, strict=True):
        turned = 8 if settings["model_type"] == "gpt_neox" else 16
        expected = [77.0 ** (-i / turned) / 4.0 for i in range(0, turned, 2)]
        for each_release in made:
            assert each_release == pytest.approx(expected, rel=1e-6), settings["model_type"]


def test_initial_weights_are_distributed_as_those_of_transformers(ranks):
    (found,) = ranks(1).run(each, initial_of_transformers, [(x,) for x in MODELS.values()])
    for settings, drawn in zip(MODELS.values(), found, strict=True):
        known = weights(TransformersShape(settings["model_type"], settings, 8))
        for name, (mean, std) in drawn.items():
            w = known[name]
            if w.kind == "normal":
                assert std == pytest.approx(w.std, rel=0.3), name
            else:
                # 4.56 draws Gemma's norms like others, though they multiply by 1 + weight
                is_off = settings["model_type"] == "gemma2" and is_before("transformers", "4.57")
                assert (mean, std) == (float(w.kind == "ones" or is_off), 0.0), name


def test_what_transformers_or_the_model_cannot_do_is_an_error_with_a_name(ranks):
    ((settings, of_data, old),) = ranks(1).run(what_is_refused, MODELS["llama"], MODELS["bloom"])
    assert tells(settings, "config.json", "model.hf", "KeyError", "'none'")
    assert tells(of_data, "bloom", "its states go on")
    for package in ("transformers", "peft"):
        assert f"needs {package} {OLDEST[package]} or newer, but {package} 0.13 is installed" in old


@pytest.mark.own_transport("memory, and no calls")
def test_a_rank_holds_its_part_and_no_more_than_one_file(ranks, tmp_path):
    """Of 109 MB in files of 8 MB: half of it, one file, and what Python needs."""
    large = {**SMALL, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    settings = {**large, "model_type": "llama", "num_key_value_heads": 4}
    folder = str(tmp_path / "model")
    ranks(1).run(save_model, settings, folder, max_shard_size="8MB", dtype="float32")
    file_bytes = max(x.stat().st_size for x in (tmp_path / "model").glob("*.safetensors"))
    whole = sum(x.stat().st_size for x in (tmp_path / "model").glob("*.safetensors"))
    for most, held in ranks(2).run(memory_of_loading, folder, 2):
        assert held < 0.52 * whole
        assert most < held + file_bytes + 8e6 < 0.7 * whole
