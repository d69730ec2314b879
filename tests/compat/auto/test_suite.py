"""Cases of tensor_parallel's own tests that look at a part of a model, its sizes or its state."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torchdistpackage.compat.tensor_parallel.state_actions import Scale, Split

import torchdistpackage.compat.tensor_parallel as tp
from tests.parallel.auto.families import FAMILIES, HALF
from tests.parallel.auto.models import (
    cache_name,
    language_model,
    prompt,
    randomised,
    same_state,
    twin,
)

FULL = pytest.mark.full


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("devices", [None, ["cpu"], ["cpu"] * 2, ["cpu"] * 3])
@pytest.mark.parametrize("sharded", [False, True])
def test_layers_note_their_sizes_and_tables_have_their_gradients(kind, devices, sharded):
    module = nn.Sequential(kind(31, 8), nn.LayerNorm(8), nn.Linear(8, 10), nn.ReLU())
    ids = torch.randint(0, 31, (2, 5))
    split = tp.TensorParallel(twin(module), devices, sharded=sharded)
    for part in split.modules():
        if isinstance(part, nn.Linear):
            assert part.weight.shape == (part.out_features, part.in_features)
    for each in (module, split):
        each(ids).norm().backward()
    parts = [next(shard[0].parameters()).grad for shard in split.module_shards]
    torch.testing.assert_close(torch.cat(parts, 1), module[0].weight.grad)


def plan_of_a_block(num: int) -> tp.Config:
    state: dict[str, Any] = {
        r"self_attention\.(query_key_value|dense)\.": Split(num, dim=0),
        r"mlp\.dense_h_to_4h\.": Split(num, dim=0),
        r"mlp\.dense_4h_to_h\.weight$": Split(num, dim=1),
        r"mlp\.dense_4h_to_h\.bias$": Scale(num),
    }
    outputs = {
        r"self_attention\.(query_key_value|dense)$": {0: "gather -1"},
        r"mlp\.dense_4h_to_h$": {0: "sum"},
    }
    return tp.Config(state, {}, outputs, {})


def block_of_bloom(threads: int | None, num: int, own: bool) -> None:
    """threads: how many; None: ranks, `num` of them."""
    torch.manual_seed(0)
    plan, devices = plan_of_a_block(num) if own else None, threads and ["cpu"] * threads
    model = randomised(hf.BloomModel(hf.BloomConfig(**HALF))).eval()
    block, ids = model.h[0], torch.ones(2, 8)
    alibi = hf.models.bloom.modeling_bloom.build_alibi_tensor(ids, 4, dtype=torch.float64)
    mask = torch.ones(8, 8, dtype=torch.bool).tril().expand(2, 1, 8, 8)
    split = tp.tensor_parallel(twin(block), devices, plan, sharded=bool(threads))
    x = torch.randn(2, 8, 24, dtype=torch.float64)
    found = []
    for each in (block, split):
        given, cache = x.clone().requires_grad_(), hf.DynamicCache(config=model.config)
        made = []
        for rows in (slice(0, 5), slice(5, 8)):  # the second with what the first one left
            seen = {"alibi": alibi[..., : rows.stop], "layer_past": cache, "use_cache": True}
            mine = mask[:, :, rows, : rows.stop]
            made.append(each(given[:, rows], attention_mask=mine, **seen)[0])
        y = torch.cat(made, 1)
        y.square().mean().backward()
        found.append((y, given.grad))
    # by a plan of this form each shard has a part of the gradient, which the softmax rounds to
    # float32 by itself
    torch.testing.assert_close(*found, atol=1e-7 if own else 1e-11, rtol=0)


NUMS = [3, *(pytest.param(n, marks=FULL) for n in (2, 4))]


@pytest.mark.parametrize("num", NUMS)
@pytest.mark.parametrize("own", [True, False], ids=["own", "by layer"])
def test_a_block_of_bloom(num, own):
    block_of_bloom(num, num, own)


@FULL
@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("own", [True, False], ids=["own", "by layer"])
@pytest.mark.late_in_full
def test_a_block_of_bloom_over_ranks(ranks, num, own):
    ranks(num).run(block_of_bloom, None, num, own)


WHOLE = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**HALF, intermediate_size=37)),
    "gpt2": lambda: language_model("gpt2"),
    "t5": FAMILIES["t5"],
    "bloom": lambda: hf.BloomModel(hf.BloomConfig(**HALF)),
}


def state_loads_again(family: str, num: int | None, sharded: bool) -> None:
    """Also where nothing is split. num: threads; None: ranks."""
    torch.manual_seed(0)
    model, devices = WHOLE[family](), num and ["cpu"] * num
    kinds = [(tp.tensor_parallel, None), (tp.tensor_parallel, tp.Config({}, {}, {}, {}))]
    for make, plan in kinds + [(tp.TensorParallel, None)] * bool(num):
        split, again = (
            make(twin(model), devices, tensor_parallel_config=plan, sharded=sharded)
            for _ in range(2)
        )
        same_state(split, model, atol=0)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        again.load_state_dict(split.state_dict())
        same_state(again, model, atol=0)


SMALL = [("t5", 3, True), ("bloom", 3, False)]
MORE = set(itertools.product(WHOLE, (2, 3, 4), (False, True))) - set(SMALL)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "num", "sharded"),
    SMALL + [pytest.param(*case, marks=FULL) for case in sorted(MORE)],
)
def test_state_is_the_models_and_loads_into_shards_again(family, num, sharded):
    state_loads_again(family, num, sharded)


@FULL
@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("family", WHOLE)
@pytest.mark.late_in_full
def test_state_of_ranks_is_the_models_and_loads_again(ranks, family, num):
    ranks(num).run(state_loads_again, family, None, False)


def test_the_inner_model_is_sharded_by_the_earlier_spelling():
    model = WHOLE["bert"]().eval()
    split = tp.tensor_parallel(twin(model), ["cpu"] * 2, sharded=False)
    split.wrapped_model = tp.Sharded(split.wrapped_model)
    assert split.wrapped_model.sharding_manager.sharded_param_names
    ids = torch.zeros(1, 8, dtype=torch.int64)
    torch.testing.assert_close(split(ids).pooler_output, model(ids).pooler_output)


@pytest.mark.parametrize("family", ["Bloom", "GPT2"])
def test_one_plan_is_for_every_head_of_a_family(family):
    from torchdistpackage.compat.tensor_parallel.pretrained_model import (
        find_predefined_tensor_parallel_config as find,
    )

    config = WHOLE[family.lower()]().config
    for kind in ("Model", "ForSequenceClassification", "ForTokenClassification"):
        model = randomised(getattr(hf, f"{family}{kind}")(config)).eval()
        plan = find(model.config, ["cpu"] * 2)
        split = tp.TensorParallelPreTrainedModel(twin(model), ["cpu"] * 2, None, None, plan)
        inputs = {"input_ids": prompt()["input_ids"][:1]}
        torch.testing.assert_close(split(**inputs)[0], model(**inputs)[0], atol=1e-11, rtol=0)


STEPS = ("bloom", "gpt_neox", "codegen", "falcon", "bert", "t5", "t5 with gates")


@pytest.mark.few(1)
@pytest.mark.parametrize("family", [pytest.param(f, marks=FULL) if f != "t5" else f for f in STEPS])
@pytest.mark.parametrize("num", [3, pytest.param(2, marks=FULL)])
@pytest.mark.parametrize("sharded", [True, pytest.param(False, marks=FULL)])
def test_hidden_states_in_three_steps(family, num, sharded):
    model = randomised(FAMILIES[family]()).eval()
    split = tp.TensorParallelPreTrainedModel(twin(model), ["cpu"] * num, sharded=sharded)
    ids, cached = prompt()["input_ids"], family != "bert"
    found = []
    for each in (model, split):
        made, cache = [], None
        for start, stop in ((0, 3), (3, 4), (4, 6)):
            step: dict[str, Any] = {"input_ids": ids[:, start:stop], "output_hidden_states": True}
            if model.config.is_encoder_decoder:
                step |= {"input_ids": ids, "decoder_input_ids": ids[:, start:stop]}
            if cached:
                step |= {cache_name(model): cache, "use_cache": True}
            out = each(**step)
            cache = out[cache_name(model)] if cached else None
            hidden = "decoder_hidden_states" if "decoder_hidden_states" in out else "hidden_states"
            made += [out.logits, out[hidden][-1]]
        found.append(made)
    torch.testing.assert_close(*found, atol=1e-11, rtol=0)


@pytest.mark.parametrize("family", ["t5", pytest.param("bloom", marks=FULL)])
def test_generation_begins_with_embeddings(family):
    model = randomised(FAMILIES[family]()).eval()
    split = tp.TensorParallelPreTrainedModel(twin(model), ["cpu"] * 2, sharded=True)
    given = torch.rand(1, 3, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options = {"min_length": 10, "max_length": 12, "do_sample": False, "output_scores": True}
    mask = torch.ones(1, 3, dtype=torch.int64)
    scores = [
        each.generate(
            inputs_embeds=given, attention_mask=mask, return_dict_in_generate=True, **options
        ).scores
        for each in (model, split)
    ]
    torch.testing.assert_close(*scores, atol=1e-11, rtol=0)
