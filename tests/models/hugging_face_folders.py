"""Folders of small transformers models with random weights, and their logits in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import transformers
from torch import Tensor

from tests.models.hugging_face_ranks import VOCAB

LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 12,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rope_keys(**values: object) -> dict[str, object]:
    """`rope_parameters` of these values, as the installed release of transformers takes them."""
    if int(transformers.__version__.partition(".")[0]) >= 5:
        return {"rope_parameters": values}
    theta = values.pop("rope_theta")
    scaling = None if values["rope_type"] == "default" else values
    return {"rope_theta": theta, "rope_scaling": scaling}


CONFIGS = {
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2, untied": lambda: transformers.GPT2Config(
        **GPT2,
        n_inner=24,
        activation_function="gelu",
        layer_norm_epsilon=1e-2,
        tie_word_embeddings=False,
    ),
    "llama": lambda: transformers.LlamaConfig(**LLAMA, **rope_keys(**LLAMA3_ROPE)),
    "llama, tied, biases, one kv head": lambda: transformers.LlamaConfig(
        **{**LLAMA, "num_key_value_heads": 1, "rms_norm_eps": 1e-2},
        head_dim=6,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        **rope_keys(
            rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=8
        ),
    ),
    "llama, as many kv heads": lambda: transformers.LlamaConfig(
        **{**LLAMA, "num_key_value_heads": 4},
        **rope_keys(rope_type="linear", rope_theta=500.0, factor=2.0),
    ),
}


def model(name: str) -> transformers.PreTrainedModel:
    """All weights, norms and biases too, away from where they begin."""
    torch.manual_seed(1)
    made = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3)
    return made


@contextmanager
def everywhere_float64() -> Iterator[None]:
    """Let transformers compute in float64 what it computes in float32: norms, rotary tables."""
    wide = {"float": torch.float64, "float32": torch.float64}
    with patch.multiple(torch, **wide), patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def in_float64(name: str, x: Tensor) -> Tensor:
    """Logits (B, S, V)."""
    with everywhere_float64(), torch.no_grad():
        return model(name)(x).logits


def save(name: str, folder: Path, dtype: torch.dtype = torch.float64, **how: object) -> Path:
    model(name).to(dtype).save_pretrained(folder, **how)
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    """What transformers reads out of a folder, in the type of its files."""
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return found.state_dict()
