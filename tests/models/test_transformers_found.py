"""Classes of transformers without a table here: what is read of them, and that they train."""

import json
import math
from datetime import date
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.models import coverage, coverage_ranks
from tests.train import parity
from torchdistpackage.config.load import loads
from torchdistpackage.errors import ConfigError
from torchdistpackage.models.families.found import SHARED
from torchdistpackage.models.shrunk_config import VOCAB, shrunk
from torchdistpackage.train.expert_plan import expert_plan
from torchdistpackage.train.plan import make_plan, num_parameters

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

    def of(family: str, **changes: object):
        key = json.dumps([family, changes])
        if key not in made:
            folder = str(tmp_path_factory.mktemp("hf") / "model")
            ranks(1).run(coverage_ranks.make_folder, settings(family, **changes), folder)
            parts = 1 if family in SHARED else 2
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


def test_what_is_cut_is_refused_with_the_class(tmp_path):
    with pytest.raises(ConfigError) as met:
        plan_of(tmp_path, "olmo2", "parallel.tensor=2")
    assert "Olmo2ForCausalLM" in str(met.value) and "parallel.tensor" in str(met.value)


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
        ("mixtral", [*EXPERT[1:], "parallel.tensor=2"], "is not cut; set tensor to 1"),
        ("mixtral", [*EXPERT[1:], "parallel.context=2"], "is not cut; set context to 1"),
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
