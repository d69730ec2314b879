"""Rotary tables of `dynamic` and `longrope` follow each document's own length."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PhimoeConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from torchdistpackage.config.packages import is_before
from torchdistpackage.models.transformers_rope import document_lengths, keep_lengths_apart

SHORT = 8
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": SHORT}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": SHORT,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
KEY = "rope_scaling" if is_before("transformers", "5") else "rope_parameters"


def embedding(rope: dict[str, Any], name: str) -> Any:
    if name == "phimoe":
        scales = {"short_mscale": 1.5, "long_mscale": 2.5}
        return PhimoeRotaryEmbedding(PhimoeConfig(**SIZES, **{KEY: {**rope, **scales}}))
    return LlamaRotaryEmbedding(LlamaConfig(**SIZES, **{KEY: dict(rope)}))


@pytest.mark.parametrize(
    ("rope", "name"), [(DYNAMIC, "llama"), (LONGROPE, "llama"), (LONGROPE, "phimoe")]
)
def test_tables_are_those_of_each_document_alone_in_a_fresh_model(rope, name):
    x, made = torch.zeros(1, 1, 32, dtype=torch.float64), embedding(rope, name)
    keep_lengths_apart(made)
    # longer, shorter, as long as was trained on, far shorter, and a token of a cache
    for rows in (
        [[20, 4], [8, 16]],
        [[12, 12], [24]],
        [[9, 15], [10, 14]],
        [[8, 8, 8], [24]],
        [[5], [5]],
    ):
        positions = [torch.cat([torch.arange(n) for n in row]) for row in rows]
        found = made(x, torch.stack(positions))
        alone = [[embedding(rope, name)(x, torch.arange(n)[None]) for n in row] for row in rows]
        for i, table in enumerate(found):
            expected = torch.stack([torch.cat([t[i][0] for t in row]) for row in alone])
            assert torch.equal(table, expected)
    padded = made(x, torch.tensor([[0, 0, 0, 1, 2], [*range(20)][:5]]))[0]
    assert torch.equal(padded[0, 2:], padded[1, :3])
    last = made(x, torch.tensor([[17], [3]]))[0]
    for row, n in enumerate((18, 4)):
        assert torch.equal(last[row, 0], embedding(rope, name)(x, torch.arange(n)[None])[0][0, -1])


def test_documents_are_as_long_as_positions_go_up_by_one():
    found = document_lengths(
        torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3], [*range(4, 10)]])
    )
    assert found.tolist() == [[3, 3, 3, 2, 2, 1], [1, 1, 4, 4, 4, 4], [10] * 6]
