"""A model that was split without weights comes to them file by file."""

from __future__ import annotations

import gc
from itertools import chain
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from tests.parallel.auto.models import SMALL, language_model, prompt, randomised, same_training
from torchdistpackage import clip_grad_norm_
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.compat.tensor_parallel.shard_states import (
    convert_state_dict,
    infer_sharded_device_map,
)
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.mark import layout_of
from torchdistpackage.parallel.auto import loading
from torchdistpackage.parallel.auto.loading import load_tensor_parallel

SIZES = {"hidden_size": 96, "intermediate_size": 300, "num_key_value_heads": 4}
CONFIG = transformers.LlamaConfig(**{**SMALL, **SIZES})


def whole_model() -> Any:
    torch.manual_seed(0)
    return randomised(transformers.LlamaForCausalLM(CONFIG))


def split_without_weights(devices: list[str] | None) -> Any:
    with accelerate.init_empty_weights():
        model = transformers.LlamaForCausalLM(CONFIG).double()
    return tensor_parallel(model, devices)


def live_bytes() -> int:
    """Of the tensors that are known to the garbage collector, each storage once."""
    storages = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and each.device.type == "cpu":
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Peak:
    """The most bytes of tensors, of those made inside, whenever a part has been loaded."""

    most = 0

    def __enter__(self) -> Peak:
        gc.collect()
        gc.freeze()  # what there is already is no longer listed
        self.patch, put = pytest.MonkeyPatch(), loading.load_entry

        def measured(*args: Any) -> None:
            put(*args)
            self.look()

        self.patch.setattr(loading, "load_entry", measured)
        return self

    def __exit__(self, *error: object) -> None:
        self.patch.undo()
        gc.unfreeze()

    def look(self) -> None:
        self.most = max(self.most, live_bytes())


def num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def loads_file_by_file(folder: Path, devices: list[str] | None) -> None:
    files = sorted(folder.glob("*.safetensors"))
    largest = max(file.stat().st_size for file in files)
    all_of_them = sum(file.stat().st_size for file in files)
    assert len(files) >= 4 and largest < all_of_them / 3
    with Peak() as peak:
        split = split_without_weights(devices)
        assert all(p.is_meta for p in split.parameters() if p.numel())
        load_tensor_parallel(split, folder)
    own = num_bytes(split.parameters())
    assert own <= peak.most <= own + largest
    with Peak() as peak:
        at_once = [load_file(file) for file in files]
        load_tensor_parallel(split_without_weights(devices), files)
        del at_once
    assert peak.most > own + largest  # the measure sees what is kept


def trains_as_the_whole(folder: Path, devices: list[str] | None) -> None:
    split = split_without_weights(devices)
    load_tensor_parallel(split, folder)
    whole = whole_model()
    same_training(split.train(), whole.train())
    if devices is None:
        cut = split.wrapped_model.module_shards[0].model.layers[0].self_attn.q_proj
        assert layout_of(cut.weight) is not None
        norms = []
        for each, clip in ((whole, torch.nn.utils.clip_grad_norm_), (split, clip_grad_norm_)):
            each.zero_grad()
            each(**prompt(), labels=prompt()["input_ids"]).loss.backward()
            norms.append(clip(each.parameters(), 1.0).item())
        assert norms[1] == pytest.approx(norms[0], rel=1e-9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("files")
    whole_model().save_pretrained(made, max_shard_size="400KB")
    return made


def test_one_file_is_in_memory_beside_the_shards_of_threads(folder):
    loads_file_by_file(folder, ["cpu"] * 2)
    trains_as_the_whole(folder, ["cpu"] * 2)


def on_a_rank(folder: Path) -> None:
    loads_file_by_file(folder, None)
    trains_as_the_whole(folder, None)


@pytest.mark.full
@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.late_in_full
def test_one_file_is_in_memory_beside_the_shard_of_a_rank(ranks, folder, num):
    ranks(num).run(on_a_rank, folder)


def test_files_are_dispatched_by_names(folder, tmp_path):
    """`convert_state_dict` of each file, and `infer_sharded_device_map`, as with accelerate."""
    largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    with Peak() as peak:
        split = split_without_weights(["cpu"] * 3)
        device_map = infer_sharded_device_map(split)
        held = chain(split.named_parameters(), split.named_buffers())
        assert set(device_map) == {name for name, _ in held}
        for file in sorted(folder.glob("*.safetensors")):
            parts = convert_state_dict(
                load_file(file), split.tensor_parallel_config, 3, for_pretrained=True
            )
            for name, part in parts.items():
                place, value = device_map[name], part.clone()
                accelerate.utils.set_module_tensor_to_device(split, name, place, value=value)
            peak.look()
            del parts, part, value
    assert peak.most <= num_bytes(split.parameters()) + 3 * largest
    same_training(split.train(), whole_model().train())


def test_tied_weights_and_weights_that_are_there_already(tmp_path):
    model = language_model("gpt2")
    model.save_pretrained(tmp_path)
    with accelerate.init_empty_weights():
        empty = transformers.GPT2LMHeadModel(model.config).double()
    empty.tie_weights()  # parameters on the meta device are made anew
    for start in (empty, language_model("gpt2").apply(zero)):
        split = tensor_parallel(start, ["cpu"] * 2)
        load_tensor_parallel(split, tmp_path / "model.safetensors")
        for shard in split.wrapped_model.module_shards:
            assert shard.lm_head.weight is shard.transformer.wte.weight
        same_training(split.train(), language_model("gpt2").train())


def zero(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.zero_()


def test_files_that_do_not_fit_are_refused_before_one_is_loaded(tmp_path):
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    split = tensor_parallel(module, ["cpu"] * 2)
    wrong = {"0.weight": torch.ones(5, 4), "2.weight": torch.ones(4, 6), "more": torch.ones(1)}
    save_file(wrong, tmp_path / "a.safetensors")
    before = {name: p.clone() for name, p in split.named_parameters()}
    with pytest.raises(LayoutError) as caught:
        load_tensor_parallel(split, tmp_path)
    for text in (
        "more is of no such model",
        "0.bias is in no file; 2.bias is in no file",
        "0.weight of shape (5, 4) gives shard 1 (2, 4), not (3, 4)",
    ):
        assert text in str(caught.value)
    assert all(torch.equal(p, before[name]) for name, p in split.named_parameters())
    with pytest.raises(LayoutError, match=r"has no \*\.safetensors"):
        load_tensor_parallel(split, tmp_path / "..")
    with pytest.raises(LayoutError, match="a Sequential was given, which has no shards"):
        load_tensor_parallel(module, tmp_path)
    save_file(dict(module.state_dict()), tmp_path / "a.safetensors")
    sharded = tensor_parallel(module, ["cpu"] * 2, sharded=True)
    with pytest.raises(LayoutError, match=r"load, then apply_sharding\(\)"):
        load_tensor_parallel(sharded, tmp_path)


def test_buffers_that_no_file_has_are_named(tmp_path):
    model = language_model("llama")
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(model.config).double()
    split = tensor_parallel(empty, ["cpu"] * 2)
    with pytest.raises(
        LayoutError,
        match=r"inv_freq.* are buffers on the meta device, and no "
        r"file",
    ):
        load_tensor_parallel(split, tmp_path)
