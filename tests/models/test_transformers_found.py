"""Classes of transformers without a table here: what is read of them, and that they train."""

import json
import math
import random
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models import coverage, coverage_ranks
from tests.train import parity
from torchdistpackage.config.load import loads
from torchdistpackage.errors import ConfigError
from torchdistpackage.families.found import SHARED
from torchdistpackage.families.registry import FAMILIES
from torchdistpackage.models import transformers_found
from torchdistpackage.models.shrunk_config import VOCAB, shrunk
from torchdistpackage.train.expert_plan import expert_plan
from torchdistpackage.train.plan import make_plan, num_parameters, stage_loads

transformers = pytest.importorskip("transformers")
RANKS_IMPORT = ("tests.models.coverage_ranks",)
FULL = (pytest.mark.full,)
STACKED = pytest.mark.skipif(
    transformers.__version__.startswith("4."), reason="transformers 4 does not stack experts"
)
LAYOUTS = {
    "data2": ["parallel.data=2"],
    "zero2": ["parallel.data=2", "parallel.zero=2"],
    "zero3": ["parallel.data=2", "parallel.zero=3"],
    "recompute": ["parallel.data=2", "train.recompute=blocks"],
}
PIPE = ["parallel.pipe=2", "pipeline.microbatches=2"]
LAYOUTS |= {"pipe2": PIPE, "pipe2-recompute": [*PIPE, "train.recompute=blocks"]}
EXPERT = ["parallel.data=2", "parallel.expert=2"]
LAYOUTS |= {
    "expert2": EXPERT,
    "expert2-zero3": [*EXPERT, "parallel.zero=3"],
    "expert2-recompute": [*EXPERT, "train.recompute=blocks"],
    "expert2-pipe2": [*EXPERT, *PIPE],
    "expert4": ["parallel.data=4", "parallel.expert=4"],
    "expert2-data4": ["parallel.data=4", "parallel.expert=2", "parallel.zero=1"],
}
TENSOR = ["parallel.tensor=2"]
CONTEXT = ["parallel.context=2"]
LAYOUTS |= {
    "context2": CONTEXT,
    "context3": ["parallel.context=3", "parallel.cp_comm_type=all_gather"],
    "context2-pipe2": [*CONTEXT, *PIPE],
    "context2-expert2": [*CONTEXT, *EXPERT],
    "context2-expert2-zero3": [*CONTEXT, *EXPERT, "parallel.zero=3"],
    "context2-expert2-recompute": [*CONTEXT, *EXPERT, "train.recompute=blocks"],
    "context2-tensor2": [*CONTEXT, *TENSOR],
}
LAYOUTS |= {
    "tensor2": TENSOR,
    "tensor4": ["parallel.tensor=4"],
    "tensor2-pipe2": [*TENSOR, *PIPE],
    "tensor2-zero3": [*TENSOR, "parallel.data=2", "parallel.zero=3"],
    "tensor2-zero1-recompute": [
        *(*TENSOR, "parallel.data=2", "parallel.zero=1", "train.recompute=blocks")
    ],
    "tensor2-expert2": [*TENSOR, *EXPERT],
    "tensor2-expert2-zero2": [*TENSOR, *EXPERT, "parallel.zero=2"],
}
EXACT = (
    *(
        "afmoe",
        "apertus",
        "arcee",
        "bitnet",
        "cohere",
        "cohere2",
        "cwm",
        "doge",
        "emu3",
        "ernie4_5",
    ),
    *("exaone4", "falcon_mamba", "gemma", "gemma3_text", "glm4", "gpt_bigcode", "gpt_oss"),
    *("granite", "granitemoe", "helium", "hyperclovax", "internlm3", "jais2", "jetmoe", "laguna"),
    *("olmo", "olmo2", "olmo3", "olmoe", "phi3", "qwen3_moe", "seed_oss", "smollm3", "stablelm"),
    *("starcoder2", "mixtral", "ministral3", "nemotron"),
)
"""Classes without a table that compute in float64 throughout, by docs/model_classes.md."""
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def settings(family: str, **changes: object) -> dict:
    """A small config.json of a family, without dropout."""
    small = shrunk(transformers.CONFIG_MAPPING[family]().to_dict())
    calm = {key: 0.0 if "drop" in key else value for key, value in small.items()}
    return {**calm, **changes, "model_type": family}


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """(folder, what transformers makes of it in one process) of a family, made once."""
    made: dict[str, tuple[str, coverage_ranks.Answer]] = {}

    def of(family: str, apart: int = 2, **changes: object):
        """apart: ranks with data of their own, each of which counts the loss of its routers."""
        parts = 1 if family in SHARED else apart
        key = json.dumps([family, parts, changes])
        if key not in made:
            folder = str(tmp_path_factory.mktemp("hf") / "model")
            ranks(1).run(coverage_ranks.make_folder, settings(family, **changes), folder)
            made[key] = folder, ranks(1).run(coverage_ranks.alone, folder, parts)[0]
        return made[key]

    return of


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [
        ("olmo2", {}, "zero3"),
        ("mixtral", ROUTERS, "data2"),
        ("gemma3_text", {}, "pipe2"),
        *(
            pytest.param(family, {}, "pipe2", marks=FULL)
            for family in ("olmo2", "phi3", "granite", "cohere", "glm4", "smollm3", "qwen3_moe")
        ),
        pytest.param("mixtral", {}, "pipe2-recompute", marks=FULL),
        pytest.param("olmo2", {}, "recompute", marks=FULL),
        pytest.param("mixtral", {}, "zero3", marks=FULL),
        pytest.param("phi3", {}, "zero2", marks=FULL),
        pytest.param("gemma3_text", {}, "recompute", marks=FULL),
        pytest.param("mamba", {}, "zero3", marks=FULL),
        pytest.param("qwen3_moe", ROUTERS, "recompute", marks=FULL),
        pytest.param("bart", {}, "data2", marks=FULL),
        pytest.param("mixtral", ROUTERS, "expert2", marks=STACKED),
        pytest.param("qwen2_moe", {}, "expert2-pipe2", marks=STACKED),
        pytest.param("olmoe", ROUTERS, "expert2-data4", marks=STACKED),
        *(
            pytest.param(
                family, {} if "pipe" in layout else ROUTERS, layout, marks=(*FULL, STACKED)
            )
            for family in SHARED
            for layout in LAYOUTS
            if layout.startswith("expert")
        ),
    ],
)
def test_three_steps_are_those_of_transformers(ranks, saved, family, changes, layout):
    """Losses, the gradient of every parameter in each step, and the weights after them."""
    folder, truth = saved(family, **changes)
    size = 4 if layout in ("expert2-pipe2", "expert4", "expert2-data4") else 2
    found = ranks(size).run(coverage_ranks.steps, [f"model.hf={folder}", *LAYOUTS[layout]])
    assert coverage_ranks.largest_difference(found, truth) < 1e-9


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [
        pytest.param("qwen3_moe", ROUTERS, "tensor2-expert2", marks=STACKED),
        ("gemma3_text", {}, "tensor2-pipe2"),
        ("phi3", {}, "tensor2"),
        ("gpt_oss", {}, "tensor2"),
        ("gemma3_text", {}, "tensor4"),
        *((x, {}, "tensor2") for x in ("olmo2", "smollm3", "granite", "cohere", "glm4")),
        *((x, {}, "tensor2-pipe2") for x in ("olmo2", "smollm3", "granite", "cohere", "glm4")),
        *((x, {}, "tensor2-zero3") for x in ("phi3", "gpt_oss", "mixtral", "granitemoe")),
        *((x, ROUTERS, "tensor2") for x in ("mixtral", "olmoe", "granitemoe")),
        ("mixtral", {}, "tensor2-zero1-recompute"),
        ("bart", {}, "tensor2"),
        ("apertus", {}, "tensor2"),
        *(
            pytest.param(family, ROUTERS, layout, marks=STACKED)
            for family in SHARED
            for layout in ("tensor2-expert2", "tensor2-expert2-zero2")
        ),
    ],
)
def test_tensor_ranks_take_the_steps_of_transformers(ranks, saved, family, changes, layout):
    """Losses, the gradient of every parameter in each step, and the weights after them."""
    folder, truth = saved(family, 2 if "zero" in layout else 1, **changes)
    size = 2 if layout == "tensor2" else 4
    found = ranks(size).run(coverage_ranks.steps, [f"model.hf={folder}", *LAYOUTS[layout]])
    assert coverage_ranks.largest_difference(found, truth) < 1e-9


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [
        pytest.param("mixtral", ROUTERS | {"sliding_window": 5}, "context2-expert2", marks=STACKED),
        ("mixtral", ROUTERS, "context3"),
        *((x, ROUTERS, "context2") for x in SHARED),
        *((x, {}, "context2-pipe2") for x in SHARED),
        *((x, ROUTERS, "context2-tensor2") for x in ("mixtral", "qwen3_moe")),
        *(
            pytest.param(x, ROUTERS, layout, marks=STACKED)
            for x in SHARED
            for layout in LAYOUTS
            if layout.startswith("context2-expert2")
        ),
    ],
)
def test_ranks_that_share_sequences_take_the_steps_of_transformers(
    ranks, saved, family, changes, layout
):
    """The loss of the routers is of whole sequences too."""
    folder, truth = saved(family, **changes)
    size = {"context2": 2, "context3": 3}.get(layout, 4)
    found = ranks(size).run(coverage_ranks.steps, [f"model.hf={folder}", *LAYOUTS[layout]])
    assert coverage_ranks.largest_difference(found, truth) < 1e-9


@pytest.mark.full
@pytest.mark.parametrize("axis", ["data 2", "tensor 2", "pipe 2"])
def test_six_classes_of_the_day_take_five_steps_of_transformers(ranks, tmp_path, axis):
    """Drawn by the date among those that compute in float64 and count no loss of routers."""
    draw, tried = random.Random(date.today().isoformat() + axis), 0
    names = [x for x in EXACT if x not in FAMILIES]
    for family in draw.sample(names, 6):
        folder = str(tmp_path / family)
        ranks(1).run(coverage_ranks.make_folder, coverage.settings(family), folder)
        truth = ranks(1).run(coverage_ranks.alone, folder, 1, 5)[0]
        run = [f"model.hf={folder}", *coverage.AXES[axis]]
        found = ranks(2).run(coverage_ranks.steps, run, 5)
        assert coverage_ranks.largest_difference(found, truth) < 1e-9, family
        tried += 1
    assert tried == 6


@pytest.mark.full
def test_a_third_of_all_classes_is_right_or_refused(pool):
    """By the date another third; `scripts/coverage` writes the table of all."""
    trained = 0
    for row in coverage.rows(pool, coverage.third(coverage.names(), date.today())):
        found = [x for axis in coverage.AXES if isinstance(x := row.get(axis), float)]
        assert all(x <= coverage.ROUNDED for x in found), row
        trained += bool(found)
    assert trained >= 35


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("mixtral", marks=STACKED),
        *(
            pytest.param(x, marks=(*FULL, STACKED))
            for x in ("deepseek_v3", "qwen2_moe", "qwen3_moe", "olmoe")
        ),
    ],
)
def test_an_untrained_export_has_the_files_of_the_folder(ranks, saved, tmp_path, family):
    """Experts are stacked in the modules and apart in the files; buffers come along."""
    folder, _ = saved(family)
    degrees = EXPERT if family in SHARED else EXPERT[:1]
    ranks(2).run(coverage_ranks.export, folder, str(tmp_path), degrees)
    mine = load_file(tmp_path / "out" / "model.safetensors")
    theirs = load_file(Path(folder) / "model.safetensors")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], x) for key, x in theirs.items())


@STACKED
def test_the_load_of_experts_is_counted_over_all_ranks(ranks, tmp_path):
    """One block in two has experts."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings("qwen3_moe", decoder_sparse_step=2)))
    run = [f"model.hf={config}"]
    (one,), two = (
        ranks(1).run(coverage_ranks.loads, run),
        ranks(2).run(coverage_ranks.loads, [*run, *EXPERT]),
    )
    assert two == [one, one]
    top_k = settings("qwen3_moe")["num_experts_per_tok"]
    tokens = coverage_ranks.BATCH * coverage_ranks.SEQ_LEN
    assert one.keys() == {f"model.layers.{i}.mlp" for i in (1, 3)}
    assert all(sum(choices) == tokens * top_k for choices in one.values())


def test_initial_weights_are_drawn_as_transformers_draws(ranks, tmp_path):
    """Alike on every layout; each with the mean and the spread of transformers' own."""
    small = settings("mixtral", hidden_size=64)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(small))
    run = [f"model.hf={config}"]
    two = parity.whole(ranks(2).run(coverage_ranks.initial, [*run, "parallel.data=2"]), rtol=0)
    one = parity.whole(ranks(1).run(coverage_ranks.initial, run))
    assert all(torch.equal(two[key], x) for key, x in one.items()) and two.keys() == one.keys()
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING["mixtral"].from_dict(small)
    )
    for name, theirs in made.named_parameters():
        spread = theirs.std().item() if theirs.numel() > 1 else 0.0
        assert one[name].mean().item() == pytest.approx(theirs.mean().item(), abs=0.004), name
        assert one[name].std().item() == pytest.approx(spread, rel=0.3), name


def plan_of(tmp_path, family: str, *overrides: str, world: int = 2, **changes: object):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings(family, **changes)))
    run = loads("", overrides=[f"model.hf={config}", "data.seq_len=12", *overrides])
    return make_plan(run, world)


def test_a_sequence_of_a_found_family_is_not_cut(tmp_path):
    run = ["parallel.tensor=2", "parallel.context=2", "parallel.sequence_parallel=true"]
    with pytest.raises(ConfigError) as met:
        plan_of(tmp_path, "olmo2", *run, world=4)
    assert "2 problems" in str(met.value) and "olmo2 cannot attend over parts" in str(met.value)
    assert "Olmo2ForCausalLM has no table of llama" in str(met.value)


def test_a_rule_that_is_wrong_is_refused_with_the_first_module_that_differs(tmp_path, monkeypatch):
    """Heads in another order than their keys, and a gradient that nobody adds up."""
    found, every = transformers_found.find_cuts, transformers_found.CHOICES

    def with_other_heads(model, read, choices):
        cuts, width = found(model, read, choices), read.sizes.heads * read.sizes.head_dim
        name = "model.layers.1.self_attn.q_proj"
        parts = width // 4, width // 4, width // 2
        wrong = replace(cuts.layers[name], heads=None, parts=parts)
        return replace(cuts, layers={**cuts.layers, name: wrong})

    def without_sums(*given):
        return replace(found(*given), partial=frozenset())

    said = {
        with_other_heads: "the first that differs is model.layers.1.self_attn.o_proj",
        without_sums: "the gradient of model.layers.0.self_attn.q_norm.weight",
    }
    monkeypatch.setattr(transformers_found, "CHOICES", every[:1])
    for wrong, where in said.items():
        monkeypatch.setattr(transformers_found, "find_cuts", wrong)
        transformers_found._read.cache_clear()
        with pytest.raises(ConfigError) as met:
            plan_of(tmp_path, "qwen3_moe", "parallel.tensor=2", head_dim=16)
        assert "parallel.tensor" in str(met.value) and where in str(met.value)
    # where a later choice is right, that one is taken: here no attention by heads
    monkeypatch.setattr(transformers_found, "CHOICES", every)
    transformers_found._read.cache_clear()
    read = plan_of(tmp_path, "qwen3_moe", "parallel.tensor=2", head_dim=16).shape.kind.found
    assert read.uncut is None and read.cuts.layers and not read.cuts.attention
    transformers_found._read.cache_clear()


@pytest.mark.parametrize(
    ("family", "share"), [("gemma3_text", 0.52), ("qwen3_moe", 0.52), ("gpt_oss", 0.55)]
)
def test_two_tensor_ranks_hold_half_of_a_model_each(tmp_path, family, share):
    plan = plan_of(tmp_path, family, "parallel.tensor=2")
    assert stage_loads(plan)[0].num_parameters < share * num_parameters(plan)


def test_what_no_stage_can_do_is_refused(tmp_path):
    """Routers count their loss over all blocks; and no stage is without a block."""
    with pytest.raises(ConfigError) as met:
        plan_of(tmp_path, "mixtral", "parallel.pipe=2", **ROUTERS)
    assert "the auxiliary loss of MixtralForCausalLM's routers" in str(met.value)
    with pytest.raises(ConfigError) as met:
        plan_of(
            tmp_path,
            "olmo2",
            "parallel.pipe=2",
            "pipeline.chunks=4",
            "pipeline.schedule=interleaved",
        )
    assert "8 stages for the 4 blocks of Olmo2ForCausalLM" in str(met.value)


@pytest.mark.parametrize(
    ("family", "more", "said"),
    [
        (
            "deepseek_v3",
            EXPERT[1:],
            "those of no other model, such as DeepseekV3ForCausalLM; set expert",
        ),
        ("llama", EXPERT[1:], "those of no other model, such as llama; set expert to 1"),
        ("deepseek_v3", ["parallel.context=2"], "deepseek_v3 cannot attend over parts of a"),
        pytest.param(
            *("qwen3_moe", ["parallel.expert=8"]),
            "ranks for the 4 experts of Qwen3MoeForCausalLM",
            marks=STACKED,
        ),
    ],
)
def test_experts_that_ranks_cannot_share_are_refused(tmp_path, family, more, said):
    with pytest.raises(ConfigError) as met:
        plan_of(tmp_path, family, *more, "data.global_batch=64", world=8)
    assert said in str(met.value)


def test_a_router_that_samples_is_not_shared(tmp_path):
    with pytest.raises(ConfigError) as met:
        plan_of(tmp_path, "phimoe", "parallel.tensor=2")
    assert "PhimoeForCausalLM: its router samples experts in training" in str(met.value)


@STACKED
def test_a_plan_says_what_experts_cost(tmp_path):
    plan = plan_of(tmp_path, "mixtral", *EXPERT[1:], "data.global_batch=64", world=4)
    found = expert_plan(plan)
    assert found is not None and found.on_rank == (2, 2)
    idle = sum(math.prod(x.shape) for x in plan.layouts.values() if len(x.shape) == 3) // 2
    assert num_parameters(plan) - found.active_parameters == idle
    shape = plan.shape
    assert shape is not None
    sent = plan.samples_per_microbatch * 12 * 2 * shape.dim * plan.numbers.activations.num_bytes
    assert (found.mean_bytes, found.most_bytes) == (sent / 2, sent)
    assert found.crossing_bytes(plan, 1) == sent / 2 and found.crossing_bytes(plan, 2) == 0


def test_a_plan_counts_an_expert_by_its_part_of_the_tokens(tmp_path):
    few = plan_of(tmp_path, "mixtral", "parallel.data=2", num_experts_per_tok=1)
    more = plan_of(tmp_path, "mixtral", "parallel.data=2", num_experts_per_tok=2)
    assert few.model is not None and more.model is not None
    assert few.model.flops_per_token() < more.model.flops_per_token()
    assert sum(few.model.piece_parameters()) == sum(more.model.piece_parameters())


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text", "phi3", "olmo2", "mixtral"])
def test_a_small_copy_has_every_kind_of_layer(family):
    whole = transformers.CONFIG_MAPPING[family]().to_dict()
    small = shrunk(whole)
    assert small["vocab_size"] == VOCAB
    kinds = whole.get("layer_types") or ()
    assert set(small.get("layer_types") or ()) == set(kinds)
    heads = small["num_attention_heads"], small["num_key_value_heads"]
    assert (heads[0] > heads[1]) == (whole["num_attention_heads"] > whole["num_key_value_heads"])
