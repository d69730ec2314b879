"""Column layers that read one input are one product, whose backward sums while it multiplies."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import BertConfig, BloomConfig, T5Config

from tests.parallel.auto.models import checkpoint_activations, language_model, prompt, steps, twin
from torchdistpackage.comm import collectives, primitives
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.compat.tensor_parallel.engine.entrance import ColumnForward
from torchdistpackage.compat.tensor_parallel.engine.family_plan import plan_for
from torchdistpackage.compat.tensor_parallel.engine.layerwise import default_rules
from torchdistpackage.compat.tensor_parallel.engine.wrapper import TensorParallelWrapper
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto import Config, parallelize_module
from torchdistpackage.parallel.pipeline.split_backward import backward_input, backward_weight
from torchdistpackage.parallel.tensor import column_product, product_gradients


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(6, 10), nn.Linear(6, 10)
        self.down, self.more = nn.Linear(10, 6), nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return self.more(self.down(F.silu(self.gate(x)) * self.up(x)))


def gated() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), Gated()).double()


def entrances(split: nn.Module) -> dict[str, list[list[str]]]:
    """By module, names of the layers that share each product."""
    names = {part: name.rpartition(".")[2] for name, part in split.named_modules()}
    return {
        name: [[names[layer] for layer in e.layers] for e in part.entrances.values()]
        for name, part in split.named_modules()
        if isinstance(part, TensorParallelWrapper) and part.entrances
    }


def layers_share() -> None:
    llama = parallelize_module(language_model("llama"))
    found = {name.split("module_shards.0.")[1]: e for name, e in entrances(llama).items()}
    assert found.pop("lm_head") == [["tp_wrapped_module"]]
    blocks = {f"model.layers.{i}" for i in range(2)}
    assert found == {
        **{f"{block}.self_attn": [["q_proj", "k_proj", "v_proj"]] for block in blocks},
        **{f"{block}.mlp": [["gate_proj", "up_proj"]] for block in blocks},
    }
    gpt2 = parallelize_module(language_model("gpt2"))
    assert sum(len(e) for e in entrances(gpt2).values()) == 4  # c_attn and c_fc of two blocks
    # by rules each column layer is by itself, and a row layer has no entrance
    assert len(entrances(parallelize_module(gated()))) == 4


def test_which_layers_share(ranks):
    ranks(2).run(layers_share)


def test_an_attention_of_another_sequence_reads_two_inputs():
    bert = plan_for(SimpleNamespace(config=BertConfig(add_cross_attention=True)), 2)
    t5 = plan_for(SimpleNamespace(config=T5Config()), 2)
    bloom = plan_for(SimpleNamespace(config=BloomConfig()), 2)
    assert shared(bert, "bert.encoder.layer.0.attention.self") == ("query", "key", "value")
    assert shared(bert, "bert.encoder.layer.0.crossattention.self") is None
    assert shared(t5, "decoder.block.0.layer.0.SelfAttention") == ("q", "k", "v")
    assert shared(t5, "decoder.block.0.layer.1.EncDecAttention") is None
    assert shared(bloom, "transformer.h.0.self_attention") == ("query_key_value",)


def shared(plan: Config | None, module: str) -> tuple[str, ...] | None:
    """The layers that a plan has for the input of a module."""
    assert plan is not None
    found = [layers for pattern, layers in plan.entrances.items() if pattern.search(module)]
    return next(iter(found[0].values())) if found else None


def test_layers_are_named_in_a_tuple():
    with pytest.raises(LayoutError, match="'q' for 'x' is not a tuple of names of layers"):
        Config({}, {}, {}, {}, entrances={"attention$": {"x": "q"}})


def test_threads_have_none():
    assert entrances(tensor_parallel(language_model("llama"), ["cpu"] * 2)) == {}


def equal_bits(family: str) -> None:
    """Losses and weights are to the bit those of copies and plain layers."""
    model = language_model(family) if family != "gated" else gated()
    config = plan_for(model, 2) or default_rules(model, 2).config()
    splits: list[Any] = [
        parallelize_module(twin(model), config=each)
        for each in (config, replace(config, entrances={}))
    ]
    assert entrances(splits[0]) and not entrances(splits[1])
    if family == "gated":
        x = torch.randn(3, 5, 6, dtype=torch.float64)
        for split in splits:
            split(x).square().sum().backward()
    else:
        losses = [steps(split, prompt()) for split in splits]
        assert losses[0] == losses[1]
    for ours, plain in zip(*(split.parameters() for split in splits), strict=True):
        assert torch.equal(ours, plain)
        assert (ours.grad is None) == (plain.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, plain.grad)


@pytest.mark.parametrize("family", ["llama", "gated", pytest.param("gpt2", marks=pytest.mark.full)])
def test_bits_are_those_of_copies(ranks, family):
    ranks(2).run(equal_bits, family)


class Order:
    """What the backward of a product does, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.events: list[str] = []
        start, multiply = primitives.all_reduce, product_gradients.weight_gradient

        def all_reduce(x, group, *args, async_op=False, **kwargs):
            self.events.append("sum begins" if async_op else "sum")
            work = start(x, group, *args, async_op=async_op, **kwargs)
            if async_op:
                wait = work.wait

                class Waited:
                    def wait(this):
                        self.events.append("sum ends")
                        return wait()

                return Waited()
            return work

        def gradient(*args):
            self.events.append("weight")
            return multiply(*args)

        monkeypatch.setattr(primitives, "all_reduce", all_reduce)
        for where in (column_product, product_gradients):
            monkeypatch.setattr(where, "weight_gradient", gradient)


def order_of_backward() -> None:
    model = language_model("llama", num_hidden_layers=1)
    split: Any = parallelize_module(model)
    loss = split(**prompt(), labels=prompt()["input_ids"]).loss
    with pytest.MonkeyPatch.context() as patch:
        order = Order(patch)
        loss.backward()
    node = ["sum begins", *["weight"] * 3, "sum ends"]
    head, mlp = ["sum begins", "weight", "sum ends"], ["sum begins", *["weight"] * 2, "sum ends"]
    assert order.events == [*head, *mlp, *node]


def test_the_sum_of_the_input_runs_under_the_gradients_of_the_weights(ranks):
    ranks(2).run(order_of_backward)


def other_ways() -> None:
    """Checkpointing, a layer that is called twice, another input, a product that is written to, and
    a forward that fails."""
    model = language_model("llama")
    split, plain = parallelize_module(twin(model)), twin(model)
    for each in (split, plain):
        checkpoint_activations(each, use_reentrant=False)
        each.train()
    assert torch.allclose(*(torch.tensor(steps(m, prompt())) for m in (split, plain)), atol=1e-11)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 6))

        def forward(self, x):
            return self.inner(x) + self.inner(2 * x) + self.inner(x)

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 6), Twice()).double()
    split = parallelize_module(twin(whole))
    xs = [torch.ones(2, 6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for x, module in zip(xs, (whole, split), strict=True):
        module(x).square().sum().backward()
    torch.testing.assert_close(xs[0].grad, xs[1].grad, atol=1e-11, rtol=0)
    layer = next(p for p in split.modules() if isinstance(vars(p).get("forward"), ColumnForward))
    handle = layer.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        split(xs[0])
    handle.remove()
    assert all(
        e._x is None and not e._parts
        for part in split.modules()
        if isinstance(part, TensorParallelWrapper)
        for e in part.entrances.values()
    )


@pytest.mark.full
def test_other_ways_through_a_layer(ranks):
    ranks(2).run(other_ways)


def autocast() -> None:
    """Gradients add up in float32 there, as without the product."""
    model = language_model("llama").float()
    config = plan_for(model, 2)
    splits = [
        parallelize_module(twin(model), config=each)
        for each in (config, replace(config, entrances={}))
    ]
    for split in splits:
        with torch.autocast("cpu", torch.bfloat16):
            loss = split(**prompt(), labels=prompt()["input_ids"]).loss
        loss.backward()
    for ours, plain in zip(*(split.parameters() for split in splits), strict=True):
        assert ours.grad is None or torch.equal(ours.grad, plain.grad)


@pytest.mark.full
def test_under_autocast(ranks):
    ranks(2).run(autocast)


def twice_differentiated() -> None:
    """Gradients of the squares of the gradients of the input and of a cut weight."""
    model = language_model("llama", num_hidden_layers=1)
    given = torch.linspace(-1, 1, 240, dtype=torch.float64).view(2, 5, 24)
    split: Any = parallelize_module(twin(model))
    xs = [given.clone().requires_grad_() for _ in range(2)]
    for whole, x in zip((model, split), xs, strict=True):
        named = whole.named_parameters()
        weights = [p for name, p in named if "k_proj" in name or "up_proj" in name]
        with sdpa_kernel(SDPBackend.MATH):  # torch's others have no second derivative
            loss = whole(inputs_embeds=x).logits.square().mean()
        slope, *curved = torch.autograd.grad(loss, [x, *weights], create_graph=True)
        parts = sum(grad.square().sum() for grad in curved)
        if whole is split:
            parts = collectives.reduce(parts, dist.group.WORLD)
        (slope.square().sum() + parts).backward()
    torch.testing.assert_close(xs[1].grad, xs[0].grad, rtol=1e-9, atol=1e-12)


def test_gradients_of_gradients(ranks):
    ranks(2).run(twice_differentiated)


def two_passes() -> None:
    """Gradients of the weights of one product wait for a second pass, as those of layers do."""
    model = language_model("llama", num_hidden_layers=1)
    splits: list[Any] = [parallelize_module(twin(model)) for _ in range(2)]
    given = torch.linspace(-1, 1, 240, dtype=torch.float64).view(2, 5, 24)
    xs = [given.clone().requires_grad_() for _ in splits]
    ys = [split(inputs_embeds=x).logits for split, x in zip(splits, xs, strict=True)]
    grad = torch.ones_like(ys[0])
    ys[0].backward(grad)
    deferred = backward_input([ys[1]], [grad], [xs[1]])
    assert torch.equal(xs[0].grad, xs[1].grad) and deferred.parameters is not None
    named = dict(splits[1].named_parameters())
    waiting = {name: p for name, p in named.items() if id(p) in deferred.parameters}
    layers = {name.split(".")[-2] for name in waiting}
    assert layers >= {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert all(p.grad is None for p in waiting.values())
    backward_weight(deferred)
    for whole, (name, p) in zip(splits[0].parameters(), named.items(), strict=True):
        assert (p.grad is None) == (whole.grad is None), name
        assert p.grad is None or torch.equal(p.grad, whole.grad), name


def test_gradients_of_the_weights_may_wait(ranks):
    ranks(2).run(two_passes)
