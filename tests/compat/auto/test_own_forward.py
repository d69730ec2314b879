"""Layers whose class has a forward of its own: they are cut where that changes nothing."""

from __future__ import annotations

from types import MethodType

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from tests.compat.auto.test_architectures import FULL, IDS, as_one_process
from tests.parallel.auto.models import randomised, same_tokens, twin
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.compat.tensor_parallel.engine.explain import explain
from torchdistpackage.compat.tensor_parallel.engine.pairs import find_pairs

SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 20,
    "experts_implementation": "eager",
}
EXPERTS = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
SEEN = {
    "vocab_size": 61,
    "d_model": 16,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 20,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "pad_token_id": 0,
}


DEEPSEEK = SIZES | {
    "num_key_value_heads": 1,
    "head_dim": 8,
    "q_lora_rank": 8,
    "o_groups": 2,
    "o_lora_rank": 8,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_head_dim": 8,
    "index_n_heads": 4,
    "index_topk": 4,
    "partial_rotary_factor": 0.5,
}
INKLING = SIZES | {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 4,
    "d_rel": 4,
    "rel_extent": 8,
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}
PROPHET = {
    "vocab_size": 61,
    "hidden_size": 16,
    "decoder_ffn_dim": 24,
    "num_decoder_layers": 1,
    "num_decoder_attention_heads": 4,
    "max_position_embeddings": 20,
    "pad_token_id": 0,
}
STATES = {"vocab_size": 61, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
MODELS = {
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(**EXPERTS, intermediate_size_mlp=24)
    ),
    "marian": lambda: hf.MarianForCausalLM(hf.MarianConfig(**SEEN)),
    "phimoe": lambda: hf.PhimoeForCausalLM(hf.PhimoeConfig(**EXPERTS)),
    "deepseek": lambda: hf.DeepseekV4ForCausalLM(hf.DeepseekV4Config(**DEEPSEEK)),
    "dory": lambda: hf.DoryForCausalLM(hf.DoryConfig(**SIZES)),
    "blenderbot": lambda: hf.BlenderbotForCausalLM(hf.BlenderbotConfig(**SEEN)),
    "small blenderbot": lambda: hf.BlenderbotSmallForCausalLM(hf.BlenderbotSmallConfig(**SEEN)),
    "pegasus": lambda: hf.PegasusForCausalLM(hf.PegasusConfig(**SEEN)),
    "prophetnet": lambda: hf.ProphetNetForCausalLM(hf.ProphetNetConfig(**PROPHET)),
    "roformer": lambda: hf.RoFormerForCausalLM(
        hf.RoFormerConfig(**SIZES | {"is_decoder": True, "embedding_size": 16})
    ),
    "inkling": lambda: hf.InklingForCausalLM(hf.InklingTextConfig(**INKLING)),
}


@pytest.mark.parametrize(
    "name", [n if n in ("llama4", "marian") else pytest.param(n, marks=FULL) for n in MODELS]
)
def test_of_transformers(name):
    torch.manual_seed(0)
    as_one_process(MODELS[name](), {"input_ids": IDS, "use_cache": False}, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hf.MambaForCausalLM(hf.MambaConfig(**STATES)),
        pytest.param(lambda: hf.FalconMambaForCausalLM(hf.FalconMambaConfig(**STATES)), marks=FULL),
    ],
    ids=["mamba", "falcon"],
)
@pytest.mark.skipif(
    hf.__version__.startswith("4."),
    reason="in transformers 4 beams keep the states of others: without a cache tokens differ",
)
def test_states_without_keys_are_cached(make):
    torch.manual_seed(0)
    model = randomised(make())
    same_tokens(tensor_parallel(twin(model), ["cpu"] * 2), model, {"input_ids": IDS})


class Largest(nn.Linear):
    """A router: the outputs that are not among the largest two are zero."""

    def forward(self, x):
        y = super().forward(x)
        return y * (y >= y.topk(2, -1).values[..., -1:])


class Standardised(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight / weight.square().mean(), bias)


class Scaled(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 3.0


class Normed(nn.Embedding):
    def forward(self, ids):
        y = super().forward(ids)
        return y * y.square().mean(-1, keepdim=True).rsqrt()


class Head(nn.Module):
    """Multiplies by the weight of a layer, which it holds too."""

    def __init__(self, layer):
        super().__init__()
        self.weight = layer.weight

    def forward(self, x):
        return F.linear(x, self.weight.mT if self.weight.shape[0] < 9 else self.weight)


def summed(layer, x):
    return nn.Linear.forward(layer, x.cumsum(-1)).cumsum(-1)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.normed = Scaled(9, 6), Normed(9, 6)
        self.route, self.first = Largest(6, 6), nn.Conv1d(6, 8, 1)
        self.second, self.hooked = Standardised(8, 6, 1), nn.Linear(6, 6)
        self.hooked.register_forward_hook(lambda layer, x, y: y.softmax(-1))
        self.patched, self.plain = nn.Linear(6, 6), nn.Linear(6, 7)
        self.patched.forward = MethodType(summed, self.patched)
        self.source = nn.Embedding(9, 6)
        self.head = Head(self.source)

    def forward(self, ids):
        x = self.route(self.words(ids) + self.normed(ids))
        x = self.second(self.first(x.mT).relu()).mT
        x = self.patched(self.hooked(x)) + self.source(ids)
        return self.plain(x), self.head(x)


KEPT = {
    "normed": "Normed has a forward of its own",
    "route": "Largest has a forward of its own",
    "second": "Standardised has a forward of its own",
    "hooked": "it has hooks, which need all of its input and output",
    "patched": "Linear has a forward of its own",
    "source": "its weight is also that of head, which is whole",
}


@pytest.mark.parametrize("num", [2, 3])
def test_layers_that_torch_does_not_compute_stay_whole(num):
    torch.manual_seed(0)
    module = Parts()
    assert explain(module, num).kept == KEPT and find_pairs(module, num) == []
    as_one_process(module, {"ids": torch.arange(9).view(3, 3)}, num)


def over_ranks() -> None:
    torch.manual_seed(0)
    as_one_process(Parts(), {"ids": torch.arange(9).view(3, 3)}, None)


def test_over_ranks(ranks):
    ranks(2).run(over_ranks)


class Grouped(nn.Linear):
    """Its weight is not of its sizes: packed, as some checkpoints have it."""

    def __init__(self):
        super().__init__(6, 4)
        self.weight = nn.Parameter(torch.ones(2, 2, 6))

    def forward(self, x):
        return F.linear(x, self.weight.flatten(0, 1), self.bias)


def test_sizes_of_a_whole_layer_are_its_own():
    split = tensor_parallel(nn.Sequential(Grouped(), nn.Linear(4, 4)), ["cpu"] * 2)
    layer = split.module_shards[1][0]
    assert (layer.in_features, layer.out_features) == (6, 4)
