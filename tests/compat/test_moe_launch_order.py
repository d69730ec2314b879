"""Where a device runs what it is given one by one, uneven tokens must not reorder its calls."""

import pytest
import torch
from torch import Tensor, nn

from torchdistpackage import comm
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.compat.torchdistpackage import expert_grads
from torchdistpackage.compat.torchdistpackage.expert_grads import ExpertReducer
from torchdistpackage.harness.lint.linter import lint

DIM, STEPS = 2, 2
WITHOUT = (1, 2)
"""Ranks whose second expert gets no token after the first step: one of each pair of replicas, and
one of each pair that exchanges tokens."""


class Layer(nn.Module):
    """Tokens go to the other rank of my pair and back, through its expert there."""

    def __init__(self, pair: object):
        super().__init__()
        self.expert, self._pair = nn.Linear(DIM, DIM, bias=False), pair

    def forward(self, x: Tensor, uses: bool) -> Tensor:
        there = comm.all_to_all(x, 0, 0, self._pair)
        done = self.expert(there) if uses else there * 2
        return x + comm.all_to_all(done, 0, 0, self._pair)


def train(rank: int) -> list[Tensor]:
    """Experts are replicated over (0, 1) and (2, 3), tokens exchanged over (0, 2) and (1, 3)."""
    pair = tpc.groups.of([rank % 2, rank % 2 + 2])
    replicas = tpc.groups.of([rank // 2 * 2, rank // 2 * 2 + 1])
    torch.manual_seed(rank // 2)
    layers = nn.ModuleList(Layer(pair) for _ in range(2))
    made = ExpertReducer(dict(layers.named_parameters()), replicas)
    for step in range(STEPS):
        layers.zero_grad()
        x = torch.full((2, DIM), 1.0 + rank)
        for i, layer in enumerate(layers):
            x = layer(x, uses=step == 0 or i == 0 or rank not in WITHOUT)
        x.square().sum().backward()
        made.reduce_gradients()
    return [p.grad for p in layers.parameters()]


@pytest.fixture(autouse=True)
def _a_bucket_for_each_expert(monkeypatch):
    monkeypatch.setattr(expert_grads, "BUCKET_BYTES", 1)


def test_gradients_that_leave_when_a_rank_is_ready_are_found():
    """So they do where each group has connections of its own, as over gloo."""
    report = lint(train, {"data": 4}, queued=False)
    assert report.finding is not None and report.finding.kind == "launch order"
    assert "all_reduce" in str(report) and "all_to_all" in str(report)


def test_on_one_queue_they_leave_in_the_same_order_on_all_ranks():
    report = lint(train, {"data": 4}).check()
    as_over_gloo = lint(train, {"data": 4}, queued=False).results
    for mine, theirs in zip(report.results, as_over_gloo, strict=True):
        assert all(map(torch.equal, mine, theirs))
    for a, b in ((0, 1), (2, 3)):
        assert all(map(torch.equal, report.results[a], report.results[b]))
