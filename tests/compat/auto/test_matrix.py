"""The cases of tensor_parallel's own tests that no other file here has; the table of them all is
tests/compat/matrix_tensor_parallel.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import torchdistpackage.compat.tensor_parallel as tp
from tests.compat.auto.test_any_module import MODULES, as_before, chain, convolutions
from tests.parallel.auto.models import (
    cache_name,
    language_model,
    prompt,
    same_state,
    same_training,
    twin,
)

KINDS = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
OPTIONS = {
    "plain": {},
    "padding": {"padding": 1},
    "same": {"padding": "same"},
    "stride": {"stride": 2},
    "dilation": {"dilation": 2},
    "groups": {"groups": 2},
    "all": {"padding": 1, "stride": 2, "dilation": 2, "groups": 4, "bias": False},
}
EVERY = {
    f"{kind} {name}": convolutions(kind, **options)
    for kind in KINDS
    for name, options in OPTIONS.items()
    if name != "same" or "Transpose" not in kind
}


@pytest.fixture
def every_convolution(monkeypatch):
    for name, make in EVERY.items():
        monkeypatch.setitem(MODULES, name, make)


@pytest.mark.full
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("sharded", [False, True])
def test_every_convolution_over_threads(every_convolution, name, num, sharded):
    as_before(name, num, sharded)


def all_convolutions(kind: str) -> None:
    for name in (name for name in EVERY if name.startswith(f"{kind} ")):
        MODULES[name] = EVERY[name]
        try:
            as_before(name, None, False)
        finally:
            del MODULES[name]


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.late_in_full
def test_every_convolution_over_ranks(ranks, kind, num):
    ranks(num).run(all_convolutions, kind)


@pytest.mark.parametrize("devices", [None, [], ["cpu"]])
@pytest.mark.parametrize("sharded", [False, True])
def test_no_device_and_one(devices, sharded):
    module, x = chain().double(), torch.randn(3, 5, dtype=torch.float64)
    split = tp.TensorParallel(module, devices, sharded=sharded)
    assert len(split.module_shards) == 1 and torch.equal(split(x), module(x))
    split(x).sum().backward()
    with tp.save_tensor_parallel(split):
        assert list(split.state_dict()) == list(module.state_dict())


def test_what_the_factory_makes():
    split = tp.tensor_parallel(chain(), ["cpu"] * 2)
    assert type(split) is tp.TensorParallel and split.sharding_manager is None
    made = tp.tensor_parallel(language_model("gpt2"), ["cpu"] * 2)
    assert isinstance(made, tp.TensorParallelPreTrainedModel)
    assert isinstance(made, transformers.PreTrainedModel)
    assert made.wrapped_model.sharding_manager is None


@pytest.mark.parametrize("num", [2, pytest.param(3, marks=pytest.mark.full)])
def test_the_earlier_spelling_of_sharding(num, caplog):
    model = language_model("llama")
    split = tp.Sharded(tp.tensor_parallel(twin(model), ["cpu"] * num))
    assert split.wrapped_model.sharding_manager.sharded_param_names
    assert "earlier spelling" in caplog.text
    same_training(split.train(), model.train())


def decodes(family: str, num: int | None) -> None:
    """Three calls with the cache of the one before, by ids and by embeddings, then a backward."""
    model = language_model(family).eval()
    split = tp.tensor_parallel(twin(model), num and ["cpu"] * num)
    name = cache_name(model)
    ids = prompt()["input_ids"]
    embedded = model.get_input_embeddings()(ids).detach()
    for inputs in ({"input_ids": ids}, {"inputs_embeds": embedded}):
        caches: list[Any] = [None, None]
        logits = []
        for start, end in ((0, 4), (4, 5), (5, 7)):
            step = {key: x[:, start:end] for key, x in inputs.items()}
            found = [
                each(**step, **{name: cache}, use_cache=True)
                for each, cache in zip((split, model), caches, strict=True)
            ]
            caches = [each[name] for each in found]
            torch.testing.assert_close(found[0].logits, found[1].logits, atol=1e-11, rtol=0)
            logits.append([each.logits for each in found])
        whole = torch.cat([each[0] for each in logits], 1)
        torch.testing.assert_close(whole, model(**inputs).logits, atol=1e-11, rtol=0)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(ids)
    made = [
        e.generate(inputs_embeds=embedded, attention_mask=mask, **options) for e in (split, model)
    ]
    assert torch.equal(*made)
    given = [embedded.clone().requires_grad_() for _ in range(2)]
    for each, x in zip((split, model), given, strict=True):
        each(inputs_embeds=x).logits.square().mean().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad, atol=1e-11, rtol=0)


FAMILIES = ("gpt2", "llama")
IN_FULL = pytest.mark.full


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num", [2, *(pytest.param(n, marks=IN_FULL) for n in (3, 4))])
def test_decoding_in_three_steps(family, num):
    decodes(family, num)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num", [pytest.param(n, marks=IN_FULL) for n in (2, 3, 4)])
@pytest.mark.late_in_full
def test_decoding_in_three_steps_over_ranks(ranks, family, num):
    ranks(num).run(decodes, family, None)


@pytest.mark.full
@pytest.mark.parametrize("num", [3, *(pytest.param(n, marks=IN_FULL) for n in (2, 4))])
@pytest.mark.parametrize("family", ["gpt2", pytest.param("llama", marks=IN_FULL)])
def test_saved_converted_and_loaded_by_accelerate(tmp_path, num, family):
    model = language_model(family)
    split = tp.tensor_parallel(twin(model), ["cpu"] * num)
    with tp.save_tensor_parallel(split):
        split.save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    loaded = type(model).from_pretrained(tmp_path / "whole", dtype=torch.float64)
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), atol=0, rtol=0)
    state = tp.convert_state_dict(
        model.state_dict(), split.tensor_parallel_config, num, for_pretrained=True
    )
    assert set(state) >= set(split.state_dict()) and len(state) >= len(split.state_dict())
    torch.save(state, tmp_path / "shards.bin")
    apart = {key: part.clone(memory_format=torch.contiguous_format) for key, part in state.items()}
    save_file(apart, tmp_path / "shards.safetensors", {"format": "pt"})
    for file in ("shards.bin", "shards.safetensors"):
        again = tp.tensor_parallel(zeroed(model), ["cpu"] * num)
        places = tp.infer_sharded_device_map(again)
        accelerate.load_checkpoint_in_model(again, str(tmp_path / file), device_map=places)
        same_state(again, model, atol=0)


def zeroed(model: nn.Module) -> Any:
    zeros = twin(model)
    for parameter in zeros.parameters():
        parameter.data.zero_()
    return zeros


def test_eleven_shards_are_joined_by_number():
    module = nn.Sequential(nn.Linear(3, 23), nn.Tanh(), nn.Sequential(nn.Linear(23, 22)))
    split = tp.tensor_parallel(module, ["cpu"] * 11, sharded=True)
    same_state(split, module, atol=0)
    x = torch.randn(2, 3)
    torch.testing.assert_close(split(x), module(x))


def test_an_empty_plan_leaves_everything_whole():
    module, x = chain(), torch.randn(3, 5)
    split = tp.TensorParallel(module, ["cpu"] * 2, None, None, tp.Config({}, {}, {}, {}))
    held = sum(p.numel() for p in split.parameters())
    assert held < 1.3 * sum(p.numel() for p in module.parameters())  # by ZeRO instead
    torch.testing.assert_close(split(x), module(x))


@pytest.mark.parametrize("wraps", [True, False])
def test_three_forms_of_a_state_rule(wraps):
    actions = tp_actions()
    rules = {
        "action": actions.Split(2, dim=0),
        "function": lambda tensor, rank: torch.tensor_split(tensor, 2)[rank],
        "pair": (
            lambda tensor, rank: torch.tensor_split(tensor, 2)[rank],
            lambda parts: torch.cat(list(parts)),
        ),
    }
    module, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), torch.randn(2, 4)
    for form, rule in rules.items():
        output = {"^0$": {0 if wraps else "0": "gather -1"}}
        config = tp.Config({r"^0\.(weight|bias)$": rule}, {}, output, {})
        split = tp.tensor_parallel(module, ["cpu"] * 2, config)
        torch.testing.assert_close(split(x), module(x))
        if form != "function":
            same_state(split, module, atol=0)


def tp_actions() -> Any:
    import torchdistpackage.compat.tensor_parallel.state_actions as state_actions

    return state_actions


def test_every_row_of_the_matrix_names_tests_that_are_there():
    import yaml

    root = Path(__file__).parents[3]
    rows = yaml.safe_load((root / "tests/compat/matrix_tensor_parallel.yaml").read_text())
    assert {row["file"] for row in rows} == {
        *("test_basic.py", "test_factory.py", "test_integration.py", "test_legacy.py"),
        *("test_saving.py", "test_transformers.py", "README"),
    }
    assert len({(row["file"], row["test"]) for row in rows}) == len(rows) == 23
    alone = [
        r for r in rows if r["file"] == "test_basic.py" or r["test"] == "test_factory_nn_module"
    ]
    assert sum(int(row["cases"].partition(",")[0]) for row in alone) == 86
    for row in rows:
        assert row["here"], row
        for place in row["here"]:
            file, _, name = place.partition("::")
            assert f"def {name}(" in (root / file).read_text(encoding="utf-8"), place
