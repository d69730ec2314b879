"""Adapters on layers that a plan cuts: outputs, their gradients, and what is saved."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import nn

from tests.parallel.auto.models import (
    language_model,
    prompt,
    same_state,
    same_tokens,
    same_training,
    steps,
    twin,
)
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.errors import CommError, LayoutError

RANKS_IMPORT = ("peft",)
TARGETS = {
    "gpt2": ["c_attn", "c_proj", "c_fc", "wte"],
    "llama": ["q_proj", "k_proj", "o_proj", "down_proj", "lm_head"],
}
FEEDFORWARD = {"gpt2": ["c_attn"], "llama": ["down_proj", "q_proj"]}
"""Layers whose inputs IA3 scales; of the others the outputs. Either are cut by both."""


def adapted(family: str, **options):
    model = language_model(family)
    layers = LoraConfig(
        r=3,
        lora_dropout=0.0,
        target_modules=TARGETS[family],
        fan_in_fan_out=family == "gpt2",
        **options,
    )
    return with_noise(wrapped(model, layers), "lora_")


def with_ia3(family: str):
    targets = [name for name in TARGETS[family] if name not in ("wte", "lm_head")]
    layers = IA3Config(
        target_modules=targets,
        feedforward_modules=FEEDFORWARD[family],
        fan_in_fan_out=family == "gpt2",
    )
    return with_noise(wrapped(language_model(family), layers), "ia3_l")


@contextmanager
def by_earlier_names() -> Iterator[None]:
    """Of transformers' arguments, which peft still uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "Position ids are not supported")
        yield


def wrapped(model: nn.Module, config: Any):
    with by_earlier_names():
        return get_peft_model(model, config).double()


def with_noise(model: Any, part_of_name: str):
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part_of_name in name:
                noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                parameter.add_(0.3 * noise)
    return model


MADE = {"lora_": adapted, "ia3_l": with_ia3}


def trains_adapters(kind: str, family: str, num: int | None) -> None:
    model = MADE[kind](family)
    split = tensor_parallel(twin(model).train(), num and ["cpu"] * num)
    assert isinstance(split, type(model.get_base_model()))
    trained = {
        n.rpartition("module_shards.")[2] for n, p in split.named_parameters() if p.requires_grad
    }
    assert trained and all(kind in name for name in trained)
    same_training(split, model.train())
    same_tokens(split, model)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.full)])
@pytest.mark.parametrize("num", [2, pytest.param(3, marks=pytest.mark.full)])
def test_over_threads(kind, family, num):
    trains_adapters(kind, family, num)


@pytest.mark.full
@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=pytest.mark.full)])
@pytest.mark.late_in_full
def test_over_ranks(ranks, kind, family):
    ranks(2).run(trains_adapters, kind, family, None)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.to_image = nn.Conv2d(1, 3, 2)

    def forward(self, x=None):
        y = self.last(self.second(self.first(x).sin()).relu())
        return self.to_image(y.reshape(-1, 1, 2, 2)).flatten(1)


@pytest.mark.few(3)
@pytest.mark.parametrize("config", [
    LoraConfig(r=2, target_modules=["first", "last"]),
    IA3Config(target_modules=["first", "second", "last", "to_image"], feedforward_modules=[]),
    IA3Config(target_modules=["first", "last", "to_image"], feedforward_modules=["first", "last"]),
    IA3Config(target_modules=["to_image"], feedforward_modules=["to_image"]),
], ids=["LoRA", "IA3 on outputs", "IA3 on inputs", "IA3 on channels"])  # fmt: skip
@pytest.mark.parametrize("num", [2, 3])
def test_around_layers_that_are_split_by_themselves(config, num):
    torch.manual_seed(0)
    model = with_noise(wrapped(Net(), config), "ia3_l")
    split = tensor_parallel(twin(model), ["cpu"] * num)
    for _ in range(2):  # the second with what the first one's gradients made of the adapters
        x = torch.randn(3, 4, dtype=torch.float64)
        found, expected = split(x), model(x)
        torch.testing.assert_close(found, expected)
        for each, y in ((split, found), (model, expected)):
            y.square().mean().backward()
            with torch.no_grad():
                for parameter in each.parameters():
                    if parameter.grad is not None:
                        parameter -= parameter.grad
                        parameter.grad = None
    same_state(split, model)


LAST = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
PROMPTS = {
    "prefix": lambda: PrefixTuningConfig(**LAST),
    "prompt": lambda: PromptTuningConfig(**LAST),
    "P-tuning": lambda: PromptEncoderConfig(**LAST, encoder_hidden_size=8),
}


@by_earlier_names()
def trains_prompts(family: str, num: int | None) -> None:
    """Prompts are put on the split model, whose shards they are no part of."""
    model = language_model(family)
    devices = num and ["cpu"] * num
    for make in PROMPTS.values():
        found = []
        for each in (twin(model), tensor_parallel(twin(model), devices)):
            torch.manual_seed(1)
            prompted = with_noise(wrapped(each, make()), "prompt_encoder")
            prompted.train()
            losses = [torch.tensor(loss) for loss in steps(prompted, prompt())]
            trained = {n: p for n, p in prompted.named_parameters() if p.requires_grad}
            assert trained and all(name.startswith("prompt_encoder.") for name in trained)
            tokens = prompted.eval().generate(**prompt(), max_new_tokens=4, do_sample=False)
            found.append((losses, trained, tokens))
        assert found[0][0][0] != found[0][0][1]  # the prompts learn
        torch.testing.assert_close(found[1], found[0], atol=1e-11, rtol=0)


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
@pytest.mark.parametrize("num", [3, pytest.param(2, marks=pytest.mark.full)])
def test_prompts_over_threads(family, num):
    trains_prompts(family, num)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
@pytest.mark.late_in_full
def test_prompts_over_ranks(ranks, family):
    ranks(3).run(trains_prompts, family, None)


def test_what_cannot_be():
    with pytest.raises(LayoutError, match="norms of the whole weight"):
        tensor_parallel(adapted("llama", use_dora=True), ["cpu"] * 2)
    split = tensor_parallel(language_model("llama"), ["cpu"] * 2)
    with pytest.raises(CommError, match="shard 0 of 2 was called by itself"):
        split.wrapped_model.module_shards[0](**prompt())


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_before_the_split_are_refused(kind):
    model = wrapped(language_model("llama"), PROMPTS[kind]())
    with pytest.raises(LayoutError, match=r"'default' of type .*_TUNING.* split the model first"):
        tensor_parallel(model, ["cpu"] * 2)


@pytest.mark.parametrize(("make", "kind"), [
    (lambda: LoHaConfig(target_modules=["q_proj"]), "loha"),
    (lambda: AdaLoraConfig(target_modules=["q_proj"], total_step=9), "adalora"),
])  # fmt: skip
def test_other_adapters_of_split_layers_are_refused(make, kind):
    with pytest.raises(LayoutError, match=rf"q_proj has adapters of type peft\.tuners\.{kind}"):
        tensor_parallel(wrapped(language_model("llama"), make()), ["cpu"] * 2)


def test_adapters_behind_the_split_are_refused():
    split = tensor_parallel(language_model("llama"), ["cpu"] * 2)
    with pytest.raises(LayoutError, match=r"adapters \{'default': 'IA3'\} were put into .* Llama"):
        wrapped(split, IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    split = tensor_parallel(language_model("llama"), ["cpu"] * 2)
    with pytest.raises(LayoutError, match=r"adapters \{'default': 'LORA'\} were put into"):
        wrapped(split, LoraConfig(target_modules=["o_proj"]))
    outer = nn.Sequential(OrderedDict(inside=split))
    for model in (split, outer):  # as it was: nothing replaced, nothing frozen
        before = [(name, type(module)) for name, module in split.named_modules()]
        needs = [p.requires_grad for p in split.parameters()]
        with pytest.raises(LayoutError, match="call get_peft_model on the unsplit model"):
            wrapped(model, LoraConfig(target_modules=["q_proj", "o_proj", "lm_head"]))
        assert [(name, type(module)) for name, module in split.named_modules()] == before
        assert [p.requires_grad for p in split.parameters()] == needs
        assert not hasattr(split, "peft_config")
    for devices in (["cpu"] * 2, ["cpu"]):
        net = nn.Sequential(OrderedDict(norm=nn.LayerNorm(4), one=nn.Linear(4, 1)))
        split, config = tensor_parallel(net, devices), LoraConfig(target_modules=["one"])
        if len(devices) == 1:
            assert wrapped(split, config)(torch.ones(1, 4, dtype=torch.float64)).shape == (1, 1)
            continue
        with pytest.raises(LayoutError, match=r"adapters \{'default': 'LORA'\} were put into"):
            wrapped(split, config)
