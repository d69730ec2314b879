"""Embeddings and output heads of models of one's own."""

import pytest
import torch
from torch import nn

from torchdistpackage.models.tables import table_parameters


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8, bias=False)
        self.embed = nn.Embedding(8, 8)
        self.inner = nn.Linear(8, 8)
        self.head.weight = self.embed.weight

    def get_output_embeddings(self):
        return self.head


class Untied(Tied):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 8)


def chain(*last: nn.Module) -> nn.Sequential:
    inner = nn.TransformerEncoderLayer(8, 2, 8)
    return nn.Sequential(nn.Embedding(8, 8), nn.EmbeddingBag(8, 8), inner, nn.LayerNorm(8), *last)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (chain(nn.Linear(8, 8)), {"0.weight", "1.weight", "4.weight"}),
        (chain(nn.Linear(8, 8), nn.LayerNorm(8)), {"0.weight", "1.weight", "4.weight"}),
        (chain(nn.Conv1d(8, 8, 1)), {"0.weight", "1.weight"}),
        (Tied(), {"head.weight"}),
        (Untied(), {"embed.weight", "head.weight"}),
        (nn.ReLU(), set()),
    ],
    ids=["chain", "norm behind", "no linear head", "tied", "names its head", "no matrix"],
)
def test_modules_say_what_is_a_table_and_not_sizes(model, names):
    """Every matrix has a side of 8, as many as there are ids."""
    found = {id(p) for p in table_parameters(model)}
    first = {id(p): name for name, p in reversed([*model.named_parameters()])}
    assert {name for key, name in first.items() if key in found} == names
    assert all(isinstance(p, torch.nn.Parameter) for p in table_parameters(model))
