"""Every family with a plan: logits, weights after steps, names and tokens of the whole model."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.auto.families import FAMILIES, FULLY_MASKED, IN_FLOAT32
from tests.parallel.auto.models import (
    prompt,
    randomised,
    same_tokens,
    same_training,
    twin,
)
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.errors import LayoutError
from torchdistpackage.families import registry


def as_the_whole_model(family: str, num: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if family in IN_FLOAT32:
            unpatched = torch.Tensor.to
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            patch.setattr(
                torch.Tensor, "to", lambda x, *to, **named: unpatched(x, *wide(to), **named)
            )
        compare_with_whole(family, num)


def wide(given: tuple) -> list:
    return [torch.float64 if each is torch.float32 else each for each in given]


def compare_with_whole(family: str, num: int | None) -> None:
    torch.manual_seed(0)
    model = randomised(FAMILIES[family]())
    split = tensor_parallel(twin(model).train(), num and ["cpu"] * num)
    inputs = prompt()
    if family in FULLY_MASKED:
        inputs["attention_mask"].fill_(1)
    same_training(split, model.train(), inputs)
    if family != "bert":
        same_tokens(split, model, inputs)


SMALL_SET = ("t5", "bloom")


def some_in_full(families, small):
    return [f if f in small else pytest.param(f, marks=pytest.mark.full) for f in families]


@pytest.mark.parametrize("family", some_in_full(FAMILIES, SMALL_SET))
@pytest.mark.parametrize("num", some_in_full([2, 3, 4], [3]))
def test_over_threads(family, num):
    as_the_whole_model(family, num)


@pytest.mark.full
@pytest.mark.parametrize("family", some_in_full(FAMILIES, ["falcon"]))
@pytest.mark.parametrize("num", some_in_full([2, 3, 4], [2]))
@pytest.mark.late_in_full
def test_over_ranks(ranks, family, num):
    ranks(num).run(as_the_whole_model, family, None)


def test_every_family_is_tested():
    kinds = {make().config.model_type for make in FAMILIES.values()} | {"gpt2", "llama"}
    assert {*registry.FAMILIES, *registry.SPLIT_ALONE} - kinds == {"RefinedWeb", "RefinedWebModel"}


@pytest.mark.parametrize(
    ("family", "num", "text"),
    [
        ("codegen", 5, "16 attention heads in 4 blocks of 4, which 5 shards cannot"),
        ("t5", 5, "4 attention heads, which 5 shards cannot share"),
    ],
)
def test_too_many_shards_are_refused(family, num, text):
    with pytest.raises(LayoutError, match=text):
        tensor_parallel(FAMILIES[family](), ["cpu"] * num)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_encoder_alone(sharded):
    torch.manual_seed(0)
    model = randomised(FAMILIES["t5"]()).eval()
    split = tensor_parallel(twin(model), ["cpu"] * 2, sharded=sharded)
    expected = model.get_encoder()(**prompt()).last_hidden_state
    assert torch.allclose(split.get_encoder()(**prompt()).last_hidden_state, expected, atol=1e-12)
