"""Low-rank adapters on layers that a plan cuts: outputs, their gradients, and what is saved."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.parallel.auto.models import language_model, prompt, same_tokens, same_training, twin
from torchdistpackage.errors import CommError, LayoutError
from torchdistpackage.parallel.auto import tensor_parallel

TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc", "wte"],
    "llama": ["q_proj", "k_proj", "o_proj", "down_proj", "lm_head"],
}


def adapted(family: str, **options):
    model = language_model(family)
    layers = LoraConfig(
        r=3,
        lora_dropout=0.0,
        target_modules=TARGETS[family],
        fan_in_fan_out=family == "gpt2",
        **options,
    )
    with warnings.catch_warnings():  # peft asks transformers by an earlier name
        warnings.simplefilter("ignore", FutureWarning)
        model = get_peft_model(model, layers).double()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                parameter.copy_(0.3 * noise)
    return model


def trains_adapters(family: str, num: int | None) -> None:
    model = adapted(family)
    split = tensor_parallel(twin(model).train(), num and ["cpu"] * num)
    assert isinstance(split, type(model.get_base_model()))
    trained = {
        n.rpartition("module_shards.")[2] for n, p in split.named_parameters() if p.requires_grad
    }
    assert trained and all("lora_" in name for name in trained)
    same_training(split, model.train())
    same_tokens(split, model)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.full)])
@pytest.mark.parametrize("num", [2, pytest.param(3, marks=pytest.mark.full)])
def test_over_threads(family, num):
    trains_adapters(family, num)


@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.full)])
@pytest.mark.late_in_full
def test_over_ranks(ranks, family):
    ranks(2).run(trains_adapters, family, None)


def test_around_layers_that_are_split_by_themselves():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x=None):
            return self.last(self.second(self.first(x)).sin())

    model = get_peft_model(Net(), LoraConfig(r=2, target_modules=["first", "last"]))
    model = model.double()
    split = tensor_parallel(twin(model), ["cpu"] * 2)
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(split(x), model(x))


def test_what_cannot_be():
    with pytest.raises(LayoutError, match="norms of the whole weight"):
        tensor_parallel(adapted("llama", use_dora=True), ["cpu"] * 2)
    split = tensor_parallel(language_model("llama"), ["cpu"] * 2)
    with pytest.raises(CommError, match="shard 0 of 2 was called by itself"):
        split.wrapped_model.module_shards[0](**prompt())
