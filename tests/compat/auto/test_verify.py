"""The first forward of a split module is compared with the unsplit one's: every difference shows,
nothing else does, and no trace is left."""

from __future__ import annotations

import gc
import logging
import random
from copy import deepcopy
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compat.auto.test_architectures import IDS
from tests.compat.auto.test_own_forward import MODELS
from tests.parallel.auto.models import language_model, prompt
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.compat.tensor_parallel.engine import layerwise
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto import Config, Split

TWO = ["cpu"] * 2


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4), nn.Tanh())


def without_sum() -> Config:
    """The last layer by columns of its weight, whose products nobody adds up."""
    return Config(
        {r"^1\.(weight|bias)$": Split(2, 0), r"^3\.weight$": Split(2, 1)},
        {"^1$": {0: "copy"}},
        {},
        {},
        full_gradients=True,
    )


class Penalised(nn.Module):
    """Loops over its parameters, of which a shard has parts."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x), sum(p.square().sum() for p in self.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_wrong_plan_is_an_error_that_names_the_first_part(dtype, sharded):
    split = tensor_parallel(mlp().to(dtype), TWO, without_sum(), sharded=sharded, verify=True)
    for _ in range(2):  # and again, as long as nothing is changed
        with pytest.raises(
            LayoutError, match=r"\(3: outputs differ by \d.* it is a Linear.* pass verify=False"
        ):
            split(torch.ones(2, 4, dtype=dtype))


def test_what_rules_do_not_see_is_an_error_without_being_asked():
    x = torch.ones(2, 4)
    split = tensor_parallel(Penalised(), TWO)
    with pytest.raises(LayoutError, match=r"the model: outputs differ by .* it is a Penalised"):
        split(x)
    with pytest.raises(LayoutError, match="the model: outputs differ"):
        tensor_parallel(Penalised(), TWO, example=x)
    tensor_parallel(Penalised(), TWO, verify=False)(x)


def test_a_router_that_is_cut_is_named(monkeypatch):
    monkeypatch.setattr(layerwise, "has_own_forward", lambda layer: False)
    torch.manual_seed(0)
    split = tensor_parallel(MODELS["llama4"](), TWO)
    with pytest.raises(
        LayoutError,
        match=r"layers\.0\.feed_forward\.router: outputs differ by .* it is a Llama4Router",
    ):
        split(input_ids=IDS)


def wrong_on_ranks() -> list[str]:
    said = []
    for module, plan, verify in ((mlp(), without_sum(), True), (Penalised(), None, None)):
        with pytest.raises(LayoutError, match="does not compute what") as caught:
            tensor_parallel(module, None, plan, verify=verify)(torch.ones(2, 4))
        said.append(str(caught.value))
    split = tensor_parallel(Penalised())
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            next(split.parameters()).add_(1)
    split(torch.ones(2, 4))  # which no rank compares
    return said


def test_all_ranks_raise_the_same_error_or_none_compares(ranks):
    first, second = ranks(2).run(wrong_on_ranks)
    assert first == second and "(3: outputs differ by" in first[0]


class Busy(nn.Module):
    """Draws, counts, keeps statistics, and writes to its input."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.last, self.calls, self.seen = nn.Linear(6, 4), 0, []

    def forward(self, x):
        x.add_(1)
        self.calls += 1
        self.seen.append((self.training, torch.is_grad_enabled()))
        drawn = torch.rand(()) + random.random()
        return self.last(self.drop(self.norm(self.first(x)))) + 0.0 * drawn


def one_step(verify: bool) -> tuple:
    torch.manual_seed(0)
    split = tensor_parallel(Busy(), TWO, verify=verify)
    torch.manual_seed(1)
    random.seed(1)
    x = torch.ones(3, 4) * torch.arange(3.0).unsqueeze(1)
    y = split(x)
    y.sum().backward()
    own = [(s.calls, s.seen, s.training, len(s._forward_hooks)) for s in split.module_shards]
    grads = [p.grad for p in split.parameters() if p.grad is not None]
    return y, x, own, grads, list(split.buffers()), torch.rand(2), random.random()


def test_it_leaves_no_trace(caplog):
    caplog.set_level(logging.INFO)
    torch.testing.assert_close(one_step(True), one_step(False), atol=0, rtol=0)
    assert "the split equals the unsplit module, within" in caplog.text


class Close(nn.Module):
    """The sign of what is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 40))
        for name, parameter in self.inner.named_parameters():
            self.register_buffer(name.replace(".", "_"), parameter.detach().clone())

    def forward(self, x):
        like = F.linear(x, getattr(self, "0_weight"), getattr(self, "0_bias")).relu()
        like = F.linear(like, getattr(self, "2_weight"), getattr(self, "2_bias"))
        return (self.inner(x) - like).sign()


class Draws(nn.Sequential):
    def forward(self, x):
        return F.dropout(super().forward(x))


class Largest(nn.Sequential):
    def forward(self, x):
        return super().forward(x).argmax(-1)


def change(split, module, how: str) -> None:
    shard = split.module_shards[1]
    with torch.no_grad():
        if how == "shard":
            next(shard.parameters()).mul_(2)
        elif how == "original":
            next(module.parameters()).data.mul_(2)
        elif how == "attribute":
            shard[0].eps = 0.5
        elif how == "hook":
            shard[4].register_forward_hook(lambda part, x, y: y + 1)
        elif how == "dtype":
            next(split.double().module_shards[1].parameters()).mul_(2)
        elif how == "stream":
            shard.source = (x for x in ())


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("shard", "0.weight was changed since the split"),
        ("original", "0.weight was changed since the split"),
        ("dtype", "0.weight was changed since the split"),  # and not by the dtype alone
        ("attribute", "attributes or hooks of shard 1's 0 were changed"),
        ("hook", "attributes or hooks of shard 1's 4 were changed"),
        ("hook before", "2 has a hook, which would be called once more"),
        ("close", "rounding alone changes the unsplit module's output by"),
        ("draws", "rounding alone changes the unsplit module's output by"),
        ("largest", "there is no floating-point number in the output"),
        ("stream", "a copy of it cannot be called: TypeError: cannot pickle"),
    ],
)
def test_where_it_could_be_wrong_it_says_so_and_does_not_compare(how, why, caplog):
    torch.manual_seed(0)
    kinds = {"close": Close, "draws": lambda: Draws(*mlp()), "largest": lambda: Largest(*mlp())}
    module = kinds.get(how, mlp)()
    if how == "hook before":
        module[2].register_forward_hook(lambda part, x, y: y * 2)
    split = tensor_parallel(module, TWO)
    change(split, module, how)
    x = torch.randn(3, 40 if how == "close" else 4, dtype=next(split.parameters()).dtype)
    split(x)
    assert f"not compared with the unsplit module: {why}" in caplog.text
    assert len(caplog.records) == 1
    split(x)  # and it is not tried again
    assert caplog.text.count("not compared") == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_split_that_was_moved_to_another_dtype_is_compared(dtype, caplog):
    """As `tdp train` moves a user's own model to the precision of its run."""
    caplog.set_level(logging.INFO)
    split = tensor_parallel(mlp(), TWO).to(dtype)
    split(torch.randn(3, 4, dtype=dtype))
    assert "the split equals the unsplit module" in caplog.text


def test_the_unsplit_module_is_let_go_of():
    module = mlp()
    weight, split = ref(module[1].weight), tensor_parallel(module, TWO)
    del module
    assert weight() is not None
    twin = deepcopy(split)
    split(torch.ones(2, 4))
    twin(torch.ones(2, 4))
    gc.collect()
    assert weight() is None


def test_which_splits_are_compared(caplog):
    table = tensor_parallel(mlp(), TWO, explain=True).plan_table
    wanted = "first forward: compared with the unsplit module's, to 3e-04 of its largest output"
    assert str(table).endswith(wanted)
    known = tensor_parallel(language_model("llama"), TWO, explain=True)
    assert "not compared with the unsplit module's: the plan is of a known" in str(known.plan_table)
    assert not caplog.records
    tensor_parallel(mlp().to("meta"), TWO)
    assert "not compared with the unsplit module's: the unsplit module has no" in caplog.text


def test_a_model_of_a_known_family_where_it_is_asked_for(caplog):
    caplog.set_level(logging.INFO)
    split = tensor_parallel(language_model("llama").eval(), TWO, verify=True)
    split.generate(**prompt(), max_new_tokens=2, pad_token_id=0)
    assert "the split equals the unsplit module, within" in caplog.text
