"""The core of tensor parallelism for any module: ranks, and nothing of threads."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.parallel.auto.models import language_model, prompt, same_state, same_training, steps
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.parallel.auto import parallelize_module


@pytest.mark.full
def test_ranks_load_nothing_of_threads():
    code = """
import sys
from torchdistpackage.parallel import auto
for name in auto.__all__:
    getattr(auto, name)
loaded = [name for name in sys.modules if "compat.tensor_parallel" in name]
assert not loaded, loaded
assert auto.tensor_parallel.__module__ == "torchdistpackage.compat.tensor_parallel.call"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def as_one_process() -> None:
    """Training of a model of a known family, by the core and by the earlier call: equal bits."""
    model = language_model("llama")
    split, earlier = parallelize_module(model), tensor_parallel(model)
    assert type(split).__name__ == type(model).__name__
    losses = [steps(each, prompt()) for each in (split, earlier)]
    assert losses[0] == losses[1]
    ours, theirs = dict(split.named_parameters()), dict(earlier.named_parameters())
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    same_training(parallelize_module(model), language_model("llama"))


def alone() -> None:
    """A group of one rank: the module itself."""
    model = language_model("gpt2")
    split = parallelize_module(model)
    assert split.wrapped_model.module_shards[0] is model
    same_state(split, model, atol=0)


def test_over_ranks(ranks):
    ranks(2).run(as_one_process)


def test_alone(ranks):
    ranks(1).run(alone)
