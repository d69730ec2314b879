"""Caches that the unsplit model has filled go on in the split one."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tests.parallel.auto.families import FAMILIES
from tests.parallel.auto.models import cache_name, language_model, prompt, randomised, twin
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.compat.tensor_parallel.engine.family_plan import find_plan
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto import Config, get_default_config
from torchdistpackage.parallel.auto.cache_heads import filled_places

FULL = pytest.mark.full


def made(family: str) -> Any:
    torch.manual_seed(0)
    if family in ("gpt2", "llama"):
        return language_model(family).eval()
    if family == "llama with 12 heads":  # a shard of 3 has as many key heads as the model, others
        sizes = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 2}
        return language_model("llama", **sizes).eval()
    return randomised(FAMILIES[family]()).eval()


def step(model: Any, cache: Any, start: int, stop: int) -> Any:
    ids = prompt()["input_ids"]
    given = {"input_ids": ids[:, start:stop], cache_name(model): cache, "use_cache": True}
    if model.config.is_encoder_decoder:
        given |= {"input_ids": ids, "decoder_input_ids": ids[:, start:stop]}
    return model(**given)


def goes_on(family: str, num: int | None) -> None:
    model = made(family)
    split = tensor_parallel(twin(model), num and ["cpu"] * num)
    name = cache_name(model)
    with torch.no_grad():
        filled = step(model, None, 0, 3)[name]
        caches = [filled, deepcopy(filled)]
        for start, stop in ((3, 4), (4, 6)):
            found = [
                step(each, cache, start, stop)
                for each, cache in zip((model, split), caches, strict=True)
            ]
            torch.testing.assert_close(found[1].logits, found[0].logits, atol=1e-11, rtol=0)
            assert found[1][name] is caches[1]  # which grows in place, as that of the model
            assert caches[1].get_seq_length() == stop


DECODERS = ("gpt2", "llama", "llama with 12 heads", "t5", "bloom")
MORE = [name for name in FAMILIES if name not in ("bert", *DECODERS)]


@pytest.mark.parametrize("family", [*DECODERS, *(pytest.param(f, marks=FULL) for f in MORE)])
@pytest.mark.parametrize("num", [3, *(pytest.param(n, marks=FULL) for n in (2, 4))])
def test_a_filled_cache_over_threads(family, num):
    goes_on(family, num)


SMALL_SET = ("t5", "llama with 12 heads")


@pytest.mark.full
@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=FULL) for f in (*DECODERS, *MORE) if f not in SMALL_SET] + [*SMALL_SET],
)
@pytest.mark.parametrize("num", [3, *(pytest.param(n, marks=FULL) for n in (2, 4))])
@pytest.mark.late_in_full
def test_a_filled_cache_over_ranks(ranks, num, family):
    ranks(num).run(goes_on, family, None)


def partial(plan: Config) -> Config:
    """The same with a part of each gradient on each shard."""
    return Config(
        plan.state_rules,
        plan.input_rules,
        plan.output_rules,
        plan.attr_rules,
        key_heads=plan.key_heads,
    )


def gradients_of_a_prefix(num: int | None, shards: int) -> None:
    model = made("gpt2")  # nothing of which is in float32, where parts would be rounded apart
    heads = find_plan(model.config, shards)
    layers = get_default_config(model, range(shards))
    with torch.no_grad():
        filled = step(model, None, 0, 3)[cache_name(model)]
    held = [at[key] for at, key in filled_places(filled, False)]
    for plan in (heads, partial(heads), layers, partial(layers)):
        split = tensor_parallel(twin(model), num and ["cpu"] * num, plan)
        found = []
        for each in (split, model):
            leaves = [x.clone().requires_grad_() for x in held]
            cache = deepcopy(filled)
            for (at, key), leaf in zip(filled_places(cache, False), leaves, strict=True):
                at[key] = leaf * 1
            out = step(each, cache, 3, 6)
            out.logits.square().mean().backward()
            found.append([out.logits.detach(), *(x.grad for x in leaves)])
        torch.testing.assert_close(*found, atol=1e-11, rtol=0)


def test_gradients_of_what_a_cache_holds_over_threads():
    gradients_of_a_prefix(2, 2)


@pytest.mark.full
def test_gradients_of_what_a_cache_holds_over_ranks(ranks):
    ranks(2).run(gradients_of_a_prefix, None, 2)


def refusals(num: int | None) -> None:
    model = made("llama")
    devices = num and ["cpu"] * num
    split = tensor_parallel(twin(model), devices)
    name = cache_name(model)
    with torch.no_grad():
        other = step(language_model("llama", num_key_value_heads=4), None, 0, 3)[name]
        with pytest.raises(LayoutError, match=r"has keys of 4 heads, but the model .* has 2"):
            step(split, other, 3, 4)
        filled = step(model, None, 0, 3)[name]
        plan = deepcopy(split.tensor_parallel_config)
        plan.key_heads = None
        with pytest.raises(LayoutError, match=r"keys of 2 heads .* pass key_heads to its Config"):
            step(tensor_parallel(twin(model), devices, plan), filled, 3, 4)


def test_what_cannot_go_on_is_refused(ranks):
    refusals(2)
    ranks(2).run(refusals, None)


def goes_on_where_it_was_cut(num: int | None) -> None:
    """A copy of a cache that shards have is theirs too, as is one that came in empty."""
    model = made("llama with 12 heads")
    split = tensor_parallel(twin(model), num and ["cpu"] * num)
    name = cache_name(model)
    with torch.no_grad():
        empty = transformers.DynamicCache(config=model.config)
        step(split, empty, 0, 3)
        copies = [deepcopy(empty), deepcopy(step(split, None, 0, 3)[name])]
        expected = step(model, step(model, None, 0, 3)[name], 3, 6).logits
        for cache in copies:
            found = step(split, cache, 3, 6).logits
            torch.testing.assert_close(found, expected, atol=1e-11, rtol=0)


def test_a_cache_of_the_shards_is_not_cut_again(ranks):
    goes_on_where_it_was_cut(3)
    ranks(3).run(goes_on_where_it_was_cut, None)


def test_numbers_in_another_form_are_refused_where_heads_are_split():
    layer = SimpleNamespace(keys=None, values=None, _quantized_keys=(torch.ones(2, 3), 1))
    assert filled_places(SimpleNamespace(layers=[layer]), False) == []
    with pytest.raises(LayoutError, match=r"a SimpleNamespace .* its _quantized_keys no part"):
        filled_places(SimpleNamespace(layers=[layer]), True)
