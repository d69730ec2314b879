"""What a caller may get wrong is refused with what, where and what to change."""

from __future__ import annotations

import sys
import threading
import time
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from tests.parallel.auto.models import checkpoint_activations, language_model, prompt
from tests.tells import facts_pattern
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.compat.tensor_parallel.engine.hugging_face import (
    ShardedModelCalls,
    pretrained_class,
)
from torchdistpackage.compat.tensor_parallel.model import TensorParallel
from torchdistpackage.compat.tensor_parallel.pretrained import tensor_parallel_pretrained
from torchdistpackage.errors import CommError, LayoutError, NotAvailableError
from torchdistpackage.models.plan_text import split_table
from torchdistpackage.parallel.auto import Config, FirstOnly, Scale, Split, TakeChunks, make_shard

TWO = ["cpu"] * 2


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 4))


@pytest.mark.parametrize("make", [tensor_parallel, TensorParallel])
def test_a_module_is_split_once(make):
    split = tensor_parallel(mlp(), TWO)
    with pytest.raises(LayoutError, match=facts_pattern("TensorParallel", "2 shards")):
        make(split, TWO)
    with pytest.raises(LayoutError, match=facts_pattern("1.0", "TensorParallel", "2 shards")):
        make(nn.Sequential(nn.Linear(4, 4), nn.Sequential(split)), TWO)


def test_a_pretrained_model_is_split_once():
    split = tensor_parallel(language_model("gpt2"), TWO)
    for make in (tensor_parallel, tensor_parallel_pretrained()):
        with pytest.raises(
            LayoutError, match=facts_pattern("wrapped_model", "TensorParallel", "2 shards")
        ):
            make(split, TWO)


def split_twice() -> None:
    split = tensor_parallel(mlp())
    with pytest.raises(LayoutError, match="split already"):
        tensor_parallel(split)


def test_a_shard_of_a_rank_is_split_once(ranks):
    ranks(2).run(split_twice)


@pytest.mark.parametrize("what", [len, "gpt2", None])
def test_what_is_no_module_is_refused(what):
    with pytest.raises(LayoutError, match=r"was given; pass a torch\.nn\.Module"):
        tensor_parallel(what, TWO)


@pytest.mark.parametrize("devices", ["cpu", 2, torch.device("cpu")])
def test_devices_are_a_list(devices):
    with pytest.raises(LayoutError, match="is not a list of devices; pass one for each shard"):
        tensor_parallel(mlp(), devices)


@pytest.mark.parametrize("index", [2, -3])
def test_the_output_device_is_one_of_them(index):
    with pytest.raises(
        AssertionError, match=f"output_device_index={index} is out of range for the 2"
    ):
        tensor_parallel(mlp(), TWO, output_device_index=index)


def test_a_plan_is_a_config():
    with pytest.raises(LayoutError, match="tensor_parallel_config is a dict; pass a Config"):
        tensor_parallel(mlp(), TWO, {"weight": "split 0"})


def test_a_plan_for_another_number_of_shards_is_refused():
    """Parts that no shard takes would be lost without a word."""
    plan = Config(
        {
            r"0\.weight": Split(4, 0),
            r"2\.weight": TakeChunks(0, 1, [[0], [1], [2, 3]]),
            r"0\.bias": Split(2, 0),
            r"2\.bias": Scale(3),
        },
        *({}, {}, {}),
    )
    text = r"shards, 2: 0.*dim=0\) cuts for 4; 2.* cuts for 3; 2\\.bias.* cuts for 3; make"
    with pytest.raises(LayoutError, match=text):
        tensor_parallel(mlp(), TWO, plan)
    with pytest.raises(LayoutError, match="number of shards, 3"):
        make_shard(mlp(), "cpu", Config({"0": Split(2, 0)}, {}, {}, {}), rank=0, world_size=3)


def test_patterns_and_actions_that_are_none_are_refused_at_once():
    with pytest.raises(LayoutError) as caught:
        Config({"(": FirstOnly()}, {"i)": {0: "copy"}}, {"o": "sum"}, {"a": {"n": 1}, "[": {}})
    text = str(caught.value)
    for part in ("'('", "'i)'", "o: 'sum' is not a dict", "'['", "a: 1 for 'n' is not a function"):
        assert part in text


def test_a_module_without_parameters_computes():
    module, x = nn.Sequential(nn.ReLU(), nn.Tanh()), torch.randn(2, 3)
    for sharded in (False, True):
        assert torch.equal(tensor_parallel(module, TWO, sharded=sharded)(x), module(x))


def test_recomputation_in_threads_says_what_to_leave_out():
    split = tensor_parallel(language_model("gpt2", use_cache=False), TWO).train()
    checkpoint_activations(split)
    with pytest.raises(CommError, match="without activation checkpointing"):
        split(**prompt()).logits.sum().backward()


def scores_are_refused(family: str, devices: list[str] | None) -> None:
    model = language_model(family, _attn_implementation="eager").eval()
    split = tensor_parallel(deepcopy(model), devices)
    ids = prompt()["input_ids"]
    text = "each shard has the scores of its own heads alone"
    with pytest.raises(LayoutError, match=text):
        split(ids, output_attentions=True)
    with pytest.raises(LayoutError, match=text):
        asked = {"output_attentions": True, "return_dict_in_generate": True}
        split.generate(ids, **asked, max_new_tokens=1, pad_token_id=0)
    split.config.output_attentions = True
    with pytest.raises(LayoutError, match="output_attentions=True"):
        split(ids)
    logits = split(ids, output_attentions=False).logits
    torch.testing.assert_close(logits, model(ids).logits, atol=1e-11, rtol=0)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_scores_of_attention_are_refused(ranks, family):
    scores_are_refused(family, TWO)
    ranks(2).run(scores_are_refused, family, None)


def test_scores_of_heads_that_stay_together_are_right():
    """A family without a plan of its own: what a layer computes is joined behind it."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 37}
    config = hf.DistilBertConfig(**sizes, attn_implementation="eager")
    model = hf.DistilBertModel(config).double().eval()
    split = tensor_parallel(deepcopy(model), TWO)
    found = split(**prompt(), output_attentions=True).attentions
    expected = model(**prompt(), output_attentions=True).attentions
    assert len(found) == 2
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_a_split_model_is_copied():
    split = tensor_parallel(language_model("llama").eval(), TWO)
    twin = deepcopy(split)
    assert type(twin) is type(split)
    before = split(**prompt()).logits
    assert torch.equal(twin(**prompt()).logits, before)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert not torch.equal(twin(**prompt()).logits, before)
    assert torch.equal(split(**prompt()).logits, before)


def test_tables_are_resized_before_and_stay_tied():
    model = language_model("gpt2").eval()
    split = tensor_parallel(deepcopy(model), TWO)
    with pytest.raises(LayoutError, match="resize the model first, then split it"):
        split.resize_token_embeddings(70)
    split.tie_weights()
    for shard in split.wrapped_model.module_shards:
        assert shard.lm_head.weight is shard.transformer.wte.weight
    ids = prompt()["input_ids"]
    torch.testing.assert_close(split(ids).logits, model(ids).logits, atol=1e-11, rtol=0)


class SecondShardFails(nn.Module):
    """Its second shard raises between two sums, for which the other one then waits."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 4)
        self.third, self.fails = nn.Linear(4, 4), True

    def forward(self, x):
        x = self.second(self.first(x).relu())
        if self.fails and threading.current_thread().name == "tdp-shard-1":
            raise OSError("a disk of the second shard")
        return self.third(x)


def test_the_exception_of_one_thread_is_there_within_seconds():
    split = tensor_parallel(SecondShardFails(), ["cpu"] * 2)
    start = time.monotonic()
    for _ in range(3):
        with pytest.raises(OSError, match="a disk of the second shard"):
            split(torch.ones(2, 4))
    assert time.monotonic() - start < 5
    for shard in split.module_shards:
        shard.fails = False
    assert split(torch.ones(2, 4)).shape == (2, 4)


def test_without_the_extra_the_message_says_what_to_install(monkeypatch, tmp_path):
    for name in [each for each in sys.modules if each.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert tensor_parallel(mlp(), TWO)(torch.ones(1, 4)).shape == (1, 4)  # needs none of it
    text = r'install the extra hf: pip install "torchdistpackage\[hf\]"'
    asked_class = partial(pretrained_class.__wrapped__, ShardedModelCalls)
    for asked in (asked_class, lambda: split_table(tmp_path, 2, 8, False)):
        with pytest.raises(NotAvailableError, match=text):
            asked()


def test_weights_that_bitsandbytes_has_packed_are_refused():
    bnb = pytest.importorskip("bitsandbytes")
    module = nn.Sequential(bnb.nn.Linear8bitLt(4, 6, has_fp16_weights=False), nn.Linear(6, 4))
    module[0].weight.data = torch.ones(6, 4, dtype=torch.int8)
    with pytest.raises(LayoutError, match=facts_pattern("0.weight", "torch.int8")):
        tensor_parallel(module, TWO)


class Speaks(nn.Module):
    def __init__(self, output: object):
        super().__init__()
        self.layer, self.output = nn.Linear(4, 4), output

    def forward(self, x):
        self.layer(x)
        return self.output


@pytest.mark.parametrize("output", [None, "text", 3, {"a": (1, None)}, {1, 2}])
def test_what_is_no_tensor_comes_back_as_it_is(output):
    assert tensor_parallel(Speaks(output), TWO)(torch.ones(1, 4)) == output
