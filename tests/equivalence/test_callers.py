"""Who asks whether a split, stages or a cache compute what a model does names a planted mistake.

Each mistake is in one class of transformers' Llama and only where a model is run the other way: on
ranks, in stages, with a cache. `tdp prove` has the same in tests/harness/parity.
"""

import json
from collections.abc import Callable
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.coverage import settings
from tests.models.found_cases import transformers
from torchdistpackage.errors import ScheduleError
from torchdistpackage.models import (
    transformers_cache,
    transformers_found,
    transformers_staged,
    transformers_trial,
)
from torchdistpackage.models.transformers_small import Sample, sample_ids, small_models
from torchdistpackage.parallel.pipeline.partition import hf_decoder

assert transformers
GIVEN = settings("llama")
FIRST = "model.layers.0"


def first(change: Callable[..., Any]) -> Callable[..., Any]:
    """`change` of what is returned, or of the first of what is returned."""
    return lambda y: (change(y[0]), *y[1:]) if isinstance(y, tuple) else change(y)


def doubled_gradient(y: torch.Tensor) -> torch.Tensor:
    return y + (y - y.detach())


MISTAKES = {
    "bias": ("LlamaMLP", first(lambda y: y + 0.1), f"{FIRST}.mlp: outputs differ by "),
    "reduce": ("LlamaMLP", first(lambda y: 0.5 * y), f"{FIRST}.mlp: outputs differ by "),
    "norm": ("LlamaRMSNorm", lambda y: 1.1 * y, f"{FIRST}.input_layernorm: outputs differ by "),
    "mask": (
        "LlamaAttention",
        first(lambda y: y.flip(1)),
        f"{FIRST}.self_attn: outputs differ by ",
    ),
    "positions": (
        "LlamaRotaryEmbedding",
        first(lambda y: y.flip(1)),
        "model.rotary_emb: outputs differ by ",
    ),
    "copy": ("LlamaMLP", first(doubled_gradient), ": gradients ("),
}
"""What is wrong -> the class, what becomes of its output, what is said."""


class Planted:
    """A mistake that modules make while `on`, or that are marked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wrong: str):
        from transformers.models.llama import modeling_llama

        name, change, self.expected = MISTAKES[wrong]
        kind, self.on = getattr(modeling_llama, name), False
        forward = kind.forward

        @wraps(forward)
        def planted(module: nn.Module, *args: object, **kwargs: object) -> Any:
            y = forward(module, *args, **kwargs)
            return change(y) if self.on or "planted" in vars(module) else y

        monkeypatch.setattr(kind, "forward", planted)
        self.patch = monkeypatch

    def inside(self, owner: Any, name: str) -> None:
        """Let modules be wrong inside of calls of a method."""
        method = getattr(owner, name)

        def call(*args: object, **kwargs: object) -> Any:
            self.on = True
            try:
                return method(*args, **kwargs)
            finally:
                self.on = False

        self.patch.setattr(owner, name, call)


def on_ranks(planted: Planted) -> str:
    split = transformers_trial.parallelize

    def wrong(twin: nn.Module, *args: object) -> None:
        split(twin, *args)
        for module in twin.modules():
            module.__dict__["planted"] = True

    planted.patch.setattr(transformers_trial, "parallelize", wrong)
    planted.patch.setattr(transformers_found, "CHOICES", transformers_found.CHOICES[:1])
    transformers_found._read.cache_clear()
    read = transformers_found.found_model(GIVEN, 2)
    transformers_found._read.cache_clear()
    return read.uncut or "nothing"


def small() -> Any:
    return next(iter(small_models(GIVEN))).eval()


def staged(planted: Planted) -> str:
    planted.inside(hf_decoder.DecoderStage, "forward")
    model = small()
    ids = sample_ids(model.config)
    problem, _ = transformers_staged.try_stages(model, Sample(ids), "model.layers")
    return problem or "nothing"


def decoder(planted: Planted) -> str:
    planted.inside(hf_decoder.DecoderStage, "forward")
    with pytest.raises(ScheduleError) as met:
        hf_decoder.decoder_stages(small(), [0, 1])
    return str(met.value)


def cached(planted: Planted) -> str:
    called = transformers_cache.TransformersCache.call

    @contextmanager
    def call(self, *args: object):
        with called(self, *args) as given:
            planted.on = True
            yield given
            planted.on = False

    planted.patch.setattr(transformers_cache.TransformersCache, "call", call)
    transformers_cache._problem.cache_clear()
    return transformers_cache._problem(json.dumps(GIVEN), None, 0) or "nothing"


CALLERS = (on_ranks, staged, decoder, cached)
WITHOUT_GRADIENTS = (decoder, cached)


def pairs():
    """Every caller with every mistake; in the small set each of both, with and without ranks."""
    small = {
        *((on_ranks, wrong) for wrong in ("reduce", "copy", "norm")),
        *((staged, wrong) for wrong in ("bias", "copy")),
        *((decoder, "mask"), (cached, "positions")),
    }
    for caller in CALLERS:
        for wrong in MISTAKES:
            marks = [] if (caller, wrong) in small else [pytest.mark.full]
            yield pytest.param(caller, wrong, id=f"{caller.__name__}-{wrong}", marks=marks)


@pytest.mark.parametrize(("caller", "wrong"), list(pairs()))
def test_a_planted_mistake_is_named(caller: Callable[..., str], wrong: str, monkeypatch):
    if wrong == "copy" and caller in WITHOUT_GRADIENTS:
        pytest.skip("it runs no backward")
    planted = Planted(monkeypatch, wrong)
    assert planted.expected in caller(planted)
