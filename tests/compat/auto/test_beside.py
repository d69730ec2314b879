"""Split models beside data parallelism, under ZeRO, clipped, and recomputed in the backward."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from tests.parallel.auto.models import language_model, prompt, same_state
from tests.parallel.auto.test_beside import recomputed, step_in_a_grid
from torchdistpackage import clip_grad_norm_
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.layout.mark import collect, layout_of


@pytest.mark.full
@pytest.mark.parametrize("how", ["ddp", "clip", "zero"])
def test_a_step_beside_data_parallelism(ranks, how):
    ranks(4).run(step_in_a_grid, how, tensor_parallel)


@pytest.mark.full
def test_activation_checkpointing_draws_again_what_was_drawn(ranks):
    ranks(2).run(recomputed, tensor_parallel)


def layouts_are_noted() -> None:
    split = tensor_parallel(language_model("gpt2"))
    fused = split.wrapped_model.module_shards[0].transformer.h[0].attn.c_attn.weight
    layout = layout_of(fused)
    assert layout.shape == (24, 72) and layout.parts[1] == (24, 24, 24)
    assert layout.split == ((), ("tensor",))
    named = {layout.name: layout for layout in collect(split).values()}
    assert named["transformer.h.0.attn.c_attn.weight"].shape == (24, 72)
    bias = named["transformer.h.0.mlp.c_proj.bias"]
    assert bias.shape == (24,) and bias.ranges == (((0, 24),), ((24, 48),))
    assert named["transformer.ln_f.weight"].is_whole


def test_parameters_say_how_they_are_cut(ranks):
    ranks(2).run(layouts_are_noted)


def shared_heads_count_once(num_heads: int, num_key_heads: int) -> None:
    model = language_model(
        "llama", num_attention_heads=num_heads, num_key_value_heads=num_key_heads
    )
    split = tensor_parallel(deepcopy(model))
    norms = []
    for each, clip in ((model, torch.nn.utils.clip_grad_norm_), (split, clip_grad_norm_)):
        each(**prompt(), labels=prompt()["input_ids"]).loss.backward()
        norms.append([clip(each.parameters(), 0.1, kind).item() for kind in (2.0, float("inf"))])
    assert norms[1] == pytest.approx(norms[0], rel=1e-9)
    with torch.no_grad():
        for each in (model, split):
            for parameter in each.parameters():
                parameter -= parameter.grad
    same_state(split, model, 1e-9)


@pytest.mark.parametrize("heads", [(4, 2), pytest.param((4, 1), marks=pytest.mark.full)])
@pytest.mark.parametrize("num", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 4))])
def test_key_heads_that_several_shards_hold_count_once(ranks, num, heads):
    ranks(num).run(shared_heads_count_once, *heads)
