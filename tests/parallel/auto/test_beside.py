"""Split models beside data parallelism, under ZeRO, clipped, and recomputed in the backward."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from tests.parallel.auto.models import language_model, prompt, same_state
from torchdistpackage import NaiveDDP, ZeroOptimizer, clip_grad_norm_, tensor_parallel, tpc


def step_in_a_grid(how: str, split_by: Callable[..., Any] = tensor_parallel) -> None:
    """2 x 2 ranks, each replica with one sample, as one process with both."""
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    model = language_model("llama")
    split = split_by(deepcopy(model))
    inputs = prompt()
    inputs["attention_mask"].fill_(1)  # so that both replicas have as many tokens
    mine = {name: x[tpc.get_dp_rank() :][:1] for name, x in inputs.items()}
    made = torch.optim.AdamW if how == "zero" else torch.optim.SGD
    expected, optimizer = made(model.parameters(), lr=0.1), made(split.parameters(), lr=0.1)
    net = split
    if how == "zero":
        optimizer = ZeroOptimizer(optimizer, split, stage=1)
    else:
        net = NaiveDDP(split)
    net(**mine, labels=mine["input_ids"]).loss.backward()
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    if how == "clip":
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found = clip_grad_norm_(split.parameters(), 0.1)
        assert found.item() == pytest.approx(norm.item(), rel=1e-9)
    optimizer.step()
    expected.step()
    if how == "zero":
        optimizer.finish()
    same_state(split, model, 1e-7 if how == "zero" else 1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["ddp", "clip", "zero"])
def test_a_step_beside_data_parallelism(ranks, how):
    ranks(4).run(step_in_a_grid, how)


def recomputed(split_by: Callable[..., Any] = tensor_parallel) -> None:
    model = language_model("gpt2", resid_pdrop=0.5).train()
    results, checkpointed.calls = [], 0
    for again in (False, True):
        split = split_by(deepcopy(model))
        if again:
            for part in split.modules():
                if hasattr(part, "gradient_checkpointing"):
                    part._gradient_checkpointing_func = checkpointed
                    part.gradient_checkpointing = True
        torch.manual_seed(4)
        loss = split(**prompt(), labels=prompt()["input_ids"], use_cache=False).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in split.parameters())])
    assert checkpointed.calls == 2
    torch.testing.assert_close(*results, atol=1e-12, rtol=0)


def checkpointed(function, *args):
    checkpointed.calls += 1
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)


checkpointed.calls = 0


def test_activation_checkpointing_draws_again_what_was_drawn(ranks):
    ranks(2).run(recomputed)
