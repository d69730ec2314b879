"""Rotary frequencies are those of transformers: bit for bit in float32, and in float64."""

from unittest.mock import patch

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.models.hugging_face_folders import rope_keys
from torchdistpackage.layout.rope import Rope
from torchdistpackage.parallel.tensor.attention import rotary_frequencies, rotary_tables

HEAD_DIM, SEQ_LEN = 32, 96
ORIGINAL = {"original_max_position_embeddings": 64}
ROPES = {
    "default": {"theta": 5e5},
    "linear": {"type": "linear", "factor": 3.0},
    "llama3": {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        **ORIGINAL,
    },
    "yarn": {"type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn, truncate": {"type": "yarn", "factor": 4.0, "truncate": False, **ORIGINAL},
    "yarn, mscale": {
        "type": "yarn",
        "factor": 4.0,
        "mscale": 0.9,
        "mscale_all_dim": 0.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "theta": 1e6,
        **ORIGINAL,
    },
}


def of_transformers(values: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Frequencies, cosines and sines, the last two of the first half of the channels."""
    renamed = {{"type": "rope_type", "theta": "rope_theta"}.get(k, k): v for k, v in values.items()}
    config = transformers.LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        **rope_keys(**{"rope_type": "default", "rope_theta": 10000.0, **renamed}),
    )
    made = LlamaRotaryEmbedding(config)
    x = torch.empty(1, dtype=torch.float32)
    cos, sin = made(x, torch.arange(SEQ_LEN)[None])
    return made.inv_freq, cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]


@pytest.mark.parametrize("name", ROPES)
def test_float32_is_that_of_transformers_bit_for_bit(name):
    frequencies, cos, sin = of_transformers(ROPES[name])
    rope = Rope(**ROPES[name])
    ours = rotary_frequencies(rope, HEAD_DIM, torch.float32)
    assert torch.equal(ours, frequencies)
    for x, y in zip(rotary_tables(SEQ_LEN, HEAD_DIM, rope=rope), (cos, sin), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ROPES)
def test_float64_is_that_of_transformers_computed_in_float64(name):
    wide = {"float": torch.float64, "float32": torch.float64}
    with patch.multiple(torch, **wide), patch.object(torch.Tensor, "float", torch.Tensor.double):
        expected = of_transformers(ROPES[name])
    assert expected[0].dtype == torch.float64
    rope = Rope(**ROPES[name])
    tables = rotary_tables(SEQ_LEN, HEAD_DIM, rope=rope, dtype=torch.float64)
    ours = (rotary_frequencies(rope, HEAD_DIM, torch.float64), *tables)
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-13)


def test_half_precision_does_not_lower_that_of_the_angles():
    cos, _ = rotary_tables(4096, 8, dtype=torch.bfloat16)
    assert cos.dtype == torch.float32
    assert len(cos[:, 0].unique()) > 4000
