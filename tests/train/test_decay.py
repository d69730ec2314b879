"""Which parameters decay: those of two dims or more that decay in transformers, class by class."""

import pytest
import torch
from torch import nn

from tests.models.coverage import names, settings
from torchdistpackage.config.load import loads
from torchdistpackage.errors import ConfigError
from torchdistpackage.models.transformers_meta import on_meta
from torchdistpackage.train.decay import decaying
from torchdistpackage.train.optimizers import make_optimizer

transformers = pytest.importorskip("transformers")
BY_ACCIDENT = {
    "axk2": "layernorm.mlp",
    "dbrx": "norm_attn_norm.attn",
    "roberta-prelayernorm": "roberta_prelayernorm.",
}
"""Paths whose matrices transformers leaves out, as they have the name of a norm in them."""
TOLD = {
    "cohere": {"use_qk_norm": True},
    "gpt_oss": {},
    "inkling2_text": {},
    "cpmant": {},
    "xlnet": {},
    "axk2": {},
    "mamba": {},
    "roberta-prelayernorm": {},
}
"""Classes with norms or biases of two dims, or with names that mislead; their settings."""


def compare(family: str, **changes: object) -> int:
    """Parameters that decay."""
    model = on_meta(settings(family, **changes))
    theirs = set(transformers.Trainer.get_decay_parameter_names(None, model))
    theirs = {name for name, p in model.named_parameters() if p.dim() > 1 and name in theirs}
    extra = decaying(model) - theirs
    assert not theirs - decaying(model)
    assert all(family in BY_ACCIDENT and BY_ACCIDENT[family] in name for name in extra), extra
    for name in extra:
        owner = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(owner, nn.Linear | nn.Embedding), name
    return len(theirs | extra)


@pytest.mark.few(4)
@pytest.mark.parametrize("family", TOLD)
def test_what_decays_is_what_transformers_lets_decay(family):
    assert compare(family, **TOLD[family]) > 2


@pytest.mark.full
def test_what_decays_in_every_class_is_what_transformers_lets_decay():
    tried = 0
    for family in names():
        try:
            tried += compare(family) > 0
        except (ConfigError, TypeError):  # no small settings are known of it
            continue
    assert tried > 170


class HeadNorm(nn.Module):
    """A norm of each head, as Cohere has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))


class Scale(nn.Module):
    """Something with a matrix, whose class says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))


class Own(nn.Module):
    """A model of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.q, self.q_norm, self.gain = HeadNorm(), Scale(), Scale()
        self.bias, self.experts_bias = (nn.Parameter(torch.zeros(4, 8)) for _ in range(2))
        self.scale, self.norm_weight = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(4, 8))
        self.unbiased, self.conv = nn.Linear(8, 8, bias=False), nn.Conv1d(8, 8, 3)
        self.group, self.renormalize = nn.GroupNorm(2, 8), nn.Linear(8, 8, bias=False)
        self.norm_proj = nn.Linear(8, 8, bias=False)


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_norms_and_biases_of_two_dims_stay_as_they_are_in_a_model_of_ones_own(name):
    model = Own()
    optimizer = make_optimizer(model, loads(f"optim: {{name: {name}}}").optim, {"embed.weight"})
    assert optimizer is not None
    found = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    shrinks = {n for n, p in model.named_parameters() if found[id(p)]}
    matrices = {f"{x}.weight" for x in ("embed", "out", "gain", "unbiased", "conv")}
    assert shrinks == matrices | {"renormalize.weight", "norm_proj.weight"}
