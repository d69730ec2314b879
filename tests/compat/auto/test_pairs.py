"""Pairs of layers without a gather between them, and the table that says what is sent."""

from __future__ import annotations

import logging
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.parallel.auto.models import language_model, prompt
from tests.tells import tells
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.compat.tensor_parallel.engine.explain import explain
from torchdistpackage.compat.tensor_parallel.engine.pairs import find_pairs
from torchdistpackage.parallel.auto import count_traffic, save_tensor_parallel


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(4, 9), nn.Linear(4, 9), nn.Linear(9, 4)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return self.down(self.drop(F.silu(self.gate(x)) * self.up(x) + 1))


class Optional(nn.Module):
    """Traced where it is called, not by itself, as the mask may be given."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), Gated()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x, mask=None):
        y = self.first(x)
        if mask is not None:
            y = y.cumsum(-1)
        return x + self.mlp(self.norm(x)) + self.second(y)


class Branches(nn.Module):
    """What is split where it is needed whole: `first` is returned, `sums` are over a row."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 6)
        self.third, self.fourth = nn.Linear(6, 8), nn.Linear(8, 2)
        self.sums, self.after = nn.Linear(4, 8), nn.Linear(8, 2)
        self.read, self.reader = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.first(x).relu()
        y = self.fourth(self.third(self.second(h)).tanh())
        y = y + self.after(self.sums(x).softmax(-1))
        return y + self.reader(self.read(x)) + self.read.weight.sum(), h


class Decides(nn.Module):
    """Takes a way by numbers, so that it cannot be traced; its part can."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = Gated(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.inner(x)) if x.sum() > 0 else self.head(x)


def twice():
    shared = nn.Linear(4, 4)
    return nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), nn.Linear(4, 8), nn.Linear(8, 1))


MODULES = {
    "chain": (
        lambda: nn.Sequential(
            nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)
        ),
        [(("0",), ("2",))],
    ),
    "gated": (Gated, [(("gate", "up"), ("down",))]),
    "optional": (Optional, [(("gate", "up"), ("down",))]),
    "called": (
        lambda: nn.Sequential(Optional()),
        [(("0.mlp.gate", "0.mlp.up"), ("0.mlp.down",)), (("0.first",), ("0.second",))],
    ),
    "branches": (Branches, [(("second",), ("third",))]),
    "decides": (Decides, [(("inner.gate", "inner.up"), ("inner.down",))]),
    "twice": (twice, [(("4",), ("5",))]),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv1d(4, 6, 3), nn.ReLU(), nn.ConvTranspose1d(6, 5, 3), nn.BatchNorm1d(5)
        ),
        [(("0",), ("2",))],
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_flow_of_split_values_is_followed(name):
    make, expected = MODULES[name]
    found = [(pair.firsts, pair.seconds) for pair in find_pairs(make(), 2)]
    if name == "optional":
        expected = [tuple(tuple(f"mlp.{n}" for n in part) for part in pair) for pair in expected]
    assert found == expected


@pytest.mark.few(6)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("num", [2, 3])
def test_pairs_compute_what_the_module_does_and_send_what_the_table_says(name, num):
    torch.manual_seed(0)
    module = MODULES[name][0]().double()
    shape = (3, 4, 7) if name == "convolutions" else (3, 4)
    x = torch.randn(shape, dtype=torch.float64)
    split = tensor_parallel(deepcopy(module), ["cpu"] * num, explain=True, example=(x,))
    with count_traffic() as counted:
        found = split(x)
    if name == "branches":  # which reads a weight of 8 x 4
        counted.calls["gather"] -= 1
        counted.num_bytes["gather"] -= 8 * 4 * 8
    assert counted == split.plan_table.forward
    expected = module(x)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    for each in (found, expected):
        sum(y.square().sum() for y in each).backward()
    with torch.no_grad():
        for parameter in [*module.parameters(), *split.parameters()]:
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    with save_tensor_parallel(split):
        torch.testing.assert_close(dict(split.state_dict()), dict(module.state_dict()))


def test_the_table_of_a_language_model(caplog):
    model = language_model("gpt2").eval()
    caplog.set_level(logging.INFO)
    split = tensor_parallel(model, ["cpu"] * 3, explain=True, example=prompt())
    with count_traffic() as counted, torch.no_grad():
        split(**prompt())
    table = split.plan_table
    assert counted == table.forward
    # two embeddings, two sums in each of two blocks, one of the tied head
    assert table.forward.calls == {"gather": 2, "sum": 5}
    shards = split.wrapped_model.module_shards
    held = [sum(p.numel() * p.element_size() for p in shard.parameters()) for shard in shards]
    assert list(table.device_bytes) == held
    text = str(table)
    assert text in caplog.text
    assert tells(
        text, "transformer.h.0.attn.c_attn.weight", "24", "72", "SplitInGroupedChunks", "dim 1"
    )
    assert "bytes a device" in text and "in a forward" in text


def counted_on_a_rank() -> None:
    model = language_model("llama").eval()
    split = tensor_parallel(model, explain=True, example=prompt())
    with count_traffic(torch.distributed.get_rank()) as counted, torch.no_grad():
        split(**prompt())
    assert counted == split.plan_table.forward and counted.calls["sum"] == 4


def test_ranks_send_what_the_table_says(ranks):
    ranks(2).run(counted_on_a_rank)


def test_what_stays_whole_is_listed_with_the_reason():
    module = nn.Sequential(
        nn.Embedding(9, 4, max_norm=1.0), nn.MultiheadAttention(4, 2), nn.Linear(4, 1)
    )
    table = explain(module, 2)
    assert table.kept == {
        "0": "max_norm needs whole rows",
        "1": "torch's attention reads the weights of its layers itself",
        "2": "1 outputs for 2 shards",
    }
    assert "max_norm needs whole rows" in str(table)
    assert all(row.cut == "whole" for row in table.parameters)
