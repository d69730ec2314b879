"""Records of steps: what they leave out."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchdistpackage.equivalence.record import without_dropout


class Sampling(nn.Module):
    """Adds noise in training, as a router does that samples experts, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.randn_like(x) if self.training else x


class Attention(nn.Module):
    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.attention_dropout, self.config, self.router = 0.5, config, Sampling()

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, self.attention_dropout, self.training)
        return self.router(F.dropout(x, self.config.resid_pdrop, self.training))


def test_what_draws_but_is_no_dropout_layer_computes_as_in_evaluation():
    net = nn.Sequential(Attention(SimpleNamespace(resid_pdrop=0.5)), nn.Dropout(0.5))
    x = torch.arange(1.0, 9.0, requires_grad=True)
    state = torch.get_rng_state()
    with without_dropout(net):
        outputs = [checkpoint(net, x, use_reentrant=False) for _ in range(2)]
        assert all(torch.equal(y, x) for y in outputs)
        outputs[0].sum().backward()
    assert torch.equal(state, torch.get_rng_state())
    attention: Any = net[0]
    assert attention.router.training and attention.router.calls == 2  # the trial is not counted
    assert (attention.attention_dropout, attention.config.resid_pdrop, net[1].p) == (0.5, 0.5, 0.5)
