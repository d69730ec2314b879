"""Dropout: the same on what all shards have, different on what each has a part of."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.parallel.auto.models import CONFIGS, language_model, prompt, same_state, steps
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.parallel.auto import save_tensor_parallel


class Drops(nn.Module):
    """A pair with dropout between its layers, dropout of whole values, and one without a layer."""

    def __init__(self):
        super().__init__()
        self.up, self.within, self.down = nn.Linear(4, 600), nn.Dropout(0.5), nn.Linear(600, 4)
        self.after, self.norm, self.last = nn.Dropout(0.5), nn.LayerNorm(4), nn.Linear(4, 400)
        self.seen = {}

    def forward(self, x):
        h = self.within(self.up(x))
        y = self.norm(F.dropout(self.after(self.down(h)), 0.3, self.training))
        return self.last(y)


def watched(shard: nn.Module, seen: list) -> None:
    """Note which elements the layer between drops, and what whole values come out."""
    inner = getattr(shard, "tp_wrapped_module", shard)
    inner.within.register_forward_hook(lambda m, x, y: seen.append((y == 0).flatten().tolist()))
    inner.norm.register_forward_hook(lambda m, x, y: seen.append(y.tolist()))


def test_threads_draw_alike_and_apart():
    torch.manual_seed(0)
    split = tensor_parallel(Drops(), ["cpu"] * 2).train()
    seen = [[], []]
    for shard, mine in zip(split.module_shards, seen, strict=True):
        watched(shard, mine)
    x = torch.randn(5, 4)
    torch.manual_seed(1)
    first = split(x)
    (cut_0, whole_0), (cut_1, whole_1) = seen
    assert whole_0 == whole_1
    assert cut_0 != cut_1 and 0.4 < sum(cut_0) / len(cut_0) < 0.6
    assert not torch.equal(split(x), first)
    torch.manual_seed(1)
    assert torch.equal(split(x), first)
    split.eval()
    assert torch.equal(split(x), split(x))


def draws_on_ranks() -> None:
    torch.manual_seed(torch.distributed.get_rank())  # which the ranks make equal
    split = tensor_parallel(Drops()).train()
    seen: list = []
    watched(split.module_shards[0], seen)
    for _ in range(2):
        split(torch.ones(5, 4)).sum().backward()
    every = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, seen)
    for other in every[1:]:
        assert other[1] == every[0][1] and other[3] == every[0][3]
        assert other[0] != every[0][0]
    assert every[0][1] != every[0][3]


@pytest.mark.parametrize("num", [2, 3])
def test_ranks_draw_alike_and_apart(ranks, num):
    ranks(num).run(draws_on_ranks)


def test_dropout_of_whole_values_is_that_of_one_process():
    """Without dropout on heads, threads with any number of shards draw the same."""
    results = []
    for num in (2, 3):
        model = language_model("gpt2", resid_pdrop=0.3, embd_pdrop=0.2)
        split = tensor_parallel(model.train(), ["cpu"] * num)
        torch.manual_seed(7)
        steps(split, prompt())
        with save_tensor_parallel(split):
            results.append(dict(split.state_dict()))
    torch.testing.assert_close(*results, atol=1e-11, rtol=0)


def test_heads_drop_apart():
    model = language_model("gpt2", attn_pdrop=0.5).train()
    model.set_attn_implementation("eager")
    split = tensor_parallel(deepcopy(model), ["cpu"] * 2)
    with torch.no_grad():
        found = [split(**prompt()).logits for _ in range(2)]
    assert not torch.equal(*found)
    assert all(not f.isnan().any() for f in found)


def test_models_without_dropout_run_without_a_mode():
    split = tensor_parallel(language_model("llama"), ["cpu"] * 2)
    assert not split.wrapped_model.may_draw and "llama" in CONFIGS
    same_state(split, language_model("llama"), atol=0)
