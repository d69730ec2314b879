"""`tensor_parallel(model)` by the table that trains it, beside `model.hf` and one process."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from torch.distributed import ProcessGroup

from tests.models import coverage, coverage_ranks
from tests.parallel.auto.families import FAMILIES, FULLY_MASKED
from tests.parallel.auto.families import IN_FLOAT32 as ROUNDED
from tests.parallel.auto.models import (
    language_model,
    prompt,
    randomised,
    same_tokens,
    same_training,
    twin,
)
from tests.train.transformers_ranks import everywhere_float64
from torchdistpackage import LayoutError, lazy, tensor_parallel
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.families import registry
from torchdistpackage.models.find_split import shape_of
from torchdistpackage.models.transformers_model import stage
from torchdistpackage.parallel.auto import count_traffic
from torchdistpackage.parallel.auto.split_model import SplitModel

SIZE = 2
BY_TABLE = ["mistral", "qwen2", "qwen3", "gemma2", "opt", "bloom", "gpt_neox"]
BY_TABLE += ["falcon", "falcon with alibi"]
FOUND = ["gemma", "mixtral", "codegen", "bert as a decoder"]


def as_one_process(family: str, num: int) -> None:
    """Layouts, outputs, weights after steps, tokens and saved state of the unsplit model."""
    tpc.setup_process_groups([("tensor", num)])
    torch.manual_seed(0)
    model = randomised(FAMILIES[family]())
    split = tensor_parallel(twin(model).train())
    assert isinstance(split, SplitModel) and isinstance(split, type(model))
    of_stage = stage(shape_of(model, num), group=tpc.get_group("tensor")).layouts()
    assert {x.name: x for x in split.layouts().values()} == {x.name: x for x in of_stage.values()}
    # peft finds the table of tokens by it
    named = {name: p.ds_shape for name, p in split.named_parameters() if hasattr(p, "ds_shape")}
    assert [*named.values()] == [model.get_input_embeddings().weight.shape]
    inputs = prompt()
    if family in FULLY_MASKED:
        inputs["attention_mask"].fill_(1)
    with everywhere_float64() if family in ROUNDED else nullcontext():
        same_training(split, model.train(), inputs)
        same_tokens(split, model, inputs)


def some(names: list[str], small: tuple[str, ...]) -> list:
    return [x if x in small else pytest.param(x, marks=pytest.mark.full) for x in names]


@pytest.mark.few(1)
@pytest.mark.parametrize("family", some([*BY_TABLE, *FOUND], ("qwen3", "gemma2")))
def test_a_split_model_is_the_one_that_trains(ranks, family):
    ranks(SIZE).run(as_one_process, family, SIZE)


def with_sequence_parallelism(family: str) -> None:
    """Steps at 1e-9 with parts of a sequence between the blocks, and products in chunks."""
    tpc.setup_process_groups([("tensor", SIZE)])
    torch.manual_seed(0)
    model = randomised(language_models(family)).train()
    split = tensor_parallel(twin(model), sequence_parallel=True, tp_comm_overlap=True)
    partial = [x for x in split.layouts().values() if x.unreduced]
    assert partial
    seen: list[tuple[int, ...]] = []
    block = split.get_submodule(f"{split._split.blocks}.0")
    handle = block.register_forward_hook(
        lambda _, __, output: seen.append(
            (output[0] if isinstance(output, tuple) else output).shape
        )
    )
    inputs = {name: x[:, :6] for name, x in prompt().items()}
    inputs["attention_mask"].fill_(1)
    same_training(split, model, inputs, atol=1e-9)
    handle.remove()
    assert {shape[1] for shape in seen} == {6 // SIZE}
    with pytest.raises(LayoutError, match="7"):
        split(**prompt())


def language_models(family: str):
    return FAMILIES[family]() if family in FAMILIES else language_model(family)


@pytest.mark.parametrize("family", some(["llama", "gpt2", "opt", "bloom", "gpt_neox"], ("llama",)))
def test_sequence_parallelism_and_overlap_train_as_one_process(ranks, family):
    ranks(SIZE).run(with_sequence_parallelism, family)


def counted_calls() -> None:
    """Sums of row layers, gathers of an embedding and of the logits; no call of a backward."""
    tpc.setup_process_groups([("tensor", SIZE)])
    model, rank = language_model("llama"), tpc.get_group("tensor").rank()
    split, inputs = tensor_parallel(model), prompt()
    with count_traffic(rank) as counted:
        split(**inputs, labels=inputs["input_ids"]).loss.backward()
    config, tokens = model.config, inputs["input_ids"].numel()
    assert counted.calls == {"sum": 2 * config.num_hidden_layers, "gather": 2}
    size = next(model.parameters()).element_size()
    one = tokens * config.hidden_size * size
    assert counted.num_bytes["sum"] == counted.calls["sum"] * one
    with count_traffic(1 - rank) as other:
        split(**inputs)
    assert other.calls == {}


def test_traffic_of_a_model_that_a_table_splits_is_counted(ranks):
    ranks(SIZE).run(counted_calls)


CLASSES = [*sorted(registry.FAMILIES), "gemma", "mixtral", "emu3", "gpt-sw3"]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CLASSES)
def test_layouts_are_those_of_a_run(tmp_path, name):
    """`scripts/coverage` looks at all classes."""
    small = coverage.settings(name, **({"multi_query": False} if name == "falcon" else {}))
    (tmp_path / "config.json").write_text(json.dumps(small))
    assert coverage_ranks.other_layouts(str(tmp_path)) is None


def test_without_the_wing_an_own_module_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(lazy, "EXTENSIONS", {})
    with pytest.raises(LayoutError, match=r"Sequential .*not a model of transformers.*ParallelMlp"):
        tensor_parallel(torch.nn.Sequential(), distributed=True, group=ProcessGroup(0, 2))


def with_prompts() -> None:
    peft = pytest.importorskip("peft")
    tpc.setup_process_groups([("tensor", SIZE)])
    model = language_model("gpt2")  # whose embedding is split by rows, as its head is
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    losses = []
    for each in (tensor_parallel(model), model):
        torch.manual_seed(0)
        made = peft.get_peft_model(each, prompts)
        losses.append(made(**prompt(), labels=prompt()["input_ids"]).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.full
def test_peft_finds_the_split_table_of_tokens(ranks):
    ranks(SIZE).run(with_prompts)
