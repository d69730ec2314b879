"""GPT-2 and Llama, split over ranks and over threads: as the model that was split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.parallel.auto.models import (
    language_model,
    prompt,
    same_state,
    same_tokens,
    same_training,
    twin,
)
from tests.tells import facts_pattern
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto.saving import save_tensor_parallel


def trains_and_generates(family: str) -> None:
    model = language_model(family)
    split = tensor_parallel(twin(model).train())
    assert isinstance(split, type(model))
    num = sum(p.numel() for p in split.parameters())
    assert num < 0.8 * sum(p.numel() for p in model.parameters())
    same_training(split, model.train())
    same_tokens(split, model)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "num"),
    [("llama", 2), ("gpt2", 3)]
    + [
        pytest.param(family, num, marks=pytest.mark.full)
        for family, num in (("gpt2", 2), ("llama", 3), ("gpt2", 4), ("llama", 4))
    ],
)
def test_over_ranks(ranks, family, num):
    ranks(num).run(trains_and_generates, family)


@pytest.mark.few(1)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("num", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 4))])
@pytest.mark.parametrize("sharded", [False, True])
def test_over_threads(family, num, sharded):
    model = language_model(family)
    split = tensor_parallel(twin(model).train(), ["cpu"] * num, sharded=sharded)
    assert isinstance(split, type(model)) and len(split.devices) == num
    same_training(split, model.train())
    same_tokens(split, model)


def beside_data(folder: Path) -> None:
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    model = language_model("llama")
    split = tensor_parallel(twin(model))
    inputs = prompt()
    mine = {name: x[tpc.get_dp_rank() :][:1] for name, x in inputs.items()}
    split(**mine, labels=mine["input_ids"]).loss.backward()
    model(**mine, labels=mine["input_ids"]).loss.backward()
    with torch.no_grad():
        for module in (split, model):
            for parameter in module.parameters():
                parameter -= parameter.grad
    same_state(split, model)
    with save_tensor_parallel(split):
        split.save_pretrained(folder / str(tpc.get_dp_rank()), max_shard_size="20KB")


@pytest.mark.late_in_full
def test_data_parallel_replicas_are_apart_and_files_are_the_models(ranks, tmp_path):
    ranks(4).run(beside_data, tmp_path)
    first = tmp_path / "0"
    index = json.loads((first / "model.safetensors.index.json").read_text())
    files = {name: load_file(first / name) for name in set(index["weight_map"].values())}
    assert len(files) > 1
    assert {name for file in files.values() for name in file} == set(
        language_model("llama").state_dict()
    )
    config = json.loads((first / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_more_shards_than_heads_are_refused():
    with pytest.raises(LayoutError, match=facts_pattern("gpt2", "4 attention", "5 shards")):
        tensor_parallel(language_model("gpt2"), ["cpu"] * 5)
