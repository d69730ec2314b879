"""The config.json that describes a GPT to transformers. No torch."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchdistpackage.config.hugging_face import GPT2_ACTIVATIONS, read_config
from torchdistpackage.models.gpt_layout import GPTShape
from torchdistpackage.models.hugging_face_layout import family_of


def config_json(shape: GPTShape, dtype: str, like: str | Path | None = None) -> dict[str, Any]:
    """Return the config.json of a model.

    dtype: torch's name of the type of the weights. like: a folder whose other settings
        (special tokens, ...) are kept.

    Raises:
        LayoutError: transformers has no such model.
        ConfigError: `like` has no readable config.json.
    """
    family = family_of(shape)
    settings = {"bos_token_id": None, "eos_token_id": None}
    if like is not None:
        settings = read_config(like)
        settings.pop("torch_dtype", None)
    of_shape = _gpt2(shape) if family == "gpt2" else _llama(shape)
    return {**settings, **of_shape, "model_type": family, "dtype": dtype}


def _gpt2(shape: GPTShape) -> dict[str, Any]:
    activations = {ours: theirs for theirs, ours in reversed(GPT2_ACTIVATIONS.items())}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": shape.layers,
        "n_embd": shape.dim,
        "n_head": shape.heads,
        "n_inner": shape.hidden,
        "n_positions": shape.num_positions,
        "vocab_size": shape.vocab,
        "activation_function": activations[shape.mlp],
        "layer_norm_epsilon": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
    }


def _llama(shape: GPTShape) -> dict[str, Any]:
    rope = {k: v for k, v in asdict(shape.rope).items() if k != "theta" and v is not None}
    kind = rope.pop("type")
    today = {"rope_theta": shape.rope.theta, "rope_type": kind, **rope}
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.dim,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.hidden,
        "max_position_embeddings": shape.num_positions,
        "vocab_size": shape.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        "tie_word_embeddings": shape.tied,
        "rope_parameters": today,
        # as versions before 5 read it
        "rope_theta": shape.rope.theta,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **rope},
    }
