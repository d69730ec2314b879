"""Settings that are null in a config.json: those that transformers takes, as it takes them."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from torchdistpackage.config.packages import is_before
from torchdistpackage.errors import ConfigError
from torchdistpackage.families.registry import FAMILIES
from torchdistpackage.models.transformers_layout import layouts, shape_of_section

SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 8),
    "vocab_size": 48,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
}


def shapes_of_transformers(settings: dict[str, object]) -> dict[str, tuple[int, ...]] | None:
    """Of the parameters of its model; None: it takes no such settings."""
    try:
        config = AutoConfig.for_model(**settings)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception:  # of huggingface_hub, or whatever a None leads to in a constructor
        return None
    return {name: tuple(x.shape) for name, x in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_null_is_what_it_is_in_transformers(tmp_path, family):
    defaults = FAMILIES[family].defaults
    small = {key: value for key, value in SMALL.items() if key in defaults}
    taken = set[str]()
    for key in (key for key, default in defaults.items() if default is not None):
        settings = {"model_type": family, **small, key: None}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        expected = shapes_of_transformers(settings)
        try:
            found = layouts(shape_of_section({"hf": str(tmp_path)}, 8, False))
        except ConfigError as error:
            assert f"{key} is null, which is" in str(error) or f"{key} is null; " in str(error)
            # transformers 4 checks no types
            assert expected is None or is_before("transformers", "5"), key
            continue
        taken.add(key)
        assert expected is not None, key
        names = {FAMILIES[family].saved_names.get(n, n): shape for n, shape in expected.items()}
        assert {name: layout.shape for name, layout in found.items()} == names, key
    assert taken >= {"pad_token_id"} & {k for k, v in defaults.items() if v is not None}
