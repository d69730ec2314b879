"""Classes of transformers without a table here: what is read of them, and that they train."""

import json
import random
import shutil
from datetime import date
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models import coverage, coverage_ranks
from tests.models.coverage import settings
from tests.models.found_cases import (
    EXACT,
    EXPERT,
    FULL,
    LAYOUTS,
    OWN_ROUTING,
    ROUTERS,
    SHARED,
    STACKED,
    transformers,
)
from tests.train import parity
from torchdistpackage.config.mtp import COUNT
from torchdistpackage.families.registry import FAMILIES, SPLIT_ALONE
from torchdistpackage.models.transformers_found import found_on
from torchdistpackage.models.transformers_layout import TransformersShape, global_name, layouts
from torchdistpackage.models.transformers_meta import on_meta
from torchdistpackage.models.transformers_weights import StoredGroup

SHARES_KEYS = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "num_key_value_heads": 2}
SHARES_KEYS |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
"""Blocks that read keys and values of earlier ones, across the cut of two stages."""
RANKS_IMPORT = ("tests.models.coverage_ranks",)


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


@pytest.mark.few(1)
@pytest.mark.parametrize("tied", [False, True])
def test_tables_are_the_embeddings_and_the_head_that_transformers_makes(tied):
    """By its own modules, whatever their sizes; in tables here and in what is read of a class."""
    families = [x for x in FAMILIES if x not in SPLIT_ALONE]
    for family in [*families, "olmo2", "mixtral", "phi3", "bart"]:
        given = settings(family, tie_word_embeddings=tied)
        model = on_meta(given, torch.float32)
        shape = TransformersShape(family, given, 8)
        tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
        weights = {id(m.weight) for m in [*tables, model.get_output_embeddings()]}
        named = model.named_parameters(remove_duplicate=False)
        expected = {global_name(shape, name) for name, p in named if id(p) in weights}
        found = {name for name, layout in layouts(shape).items() if layout.is_table}
        assert found == expected, family


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [
        ("gemma4_text", SHARES_KEYS, "pipe2"),
        ("olmo2", {}, "zero3"),
        ("mixtral", ROUTERS, "data2"),
        pytest.param("gemma4_text", SHARES_KEYS, "pipe2-recompute", marks=FULL),
        pytest.param("gemma3n_text", {}, "pipe2", marks=FULL),
        ("bart", {}, "pipe2"),
        *(
            pytest.param(family, {}, "pipe2", marks=FULL)
            for family in ("olmo2", "phi3", "granite", "cohere", "glm4", "smollm3", "qwen3_moe")
        ),
        *(
            pytest.param(family, {}, "pipe2", marks=FULL)
            for family in (
                "gemma3_text",
                "gemma3",
                "bert",
                "ctrl",
                "openai-gpt",
                "plbart",
                "llama4",
            )
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


@pytest.mark.few(1)
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
        ("camembert", {}, "tensor2"),
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


@STACKED
@pytest.mark.parametrize(
    ("family", "layer"),
    [("llama4_text", "feed_forward.router"), ("phimoe", "router"), ("deepseek_v4", "o_a_proj")],
)
def test_linear_layers_with_a_forward_of_their_own_get_no_adapters(family, layer):
    """A router that returns a tuple, and a matrix of groups."""
    found = found_on(on_meta(settings(family), torch.float32))
    inputs = {name: weight.inputs for name, weight in found.parameters.items()}
    assert 1 in inputs.values()
    assert {x for name, x in inputs.items() if name.endswith(f"{layer}.weight")} == {None}


@STACKED
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gpt_oss", "expert2"),
        ("deepseek_v3", "tensor2-expert2"),
        *(
            (family, layout)
            for family in OWN_ROUTING
            for layout in ("expert2", "expert2-zero3", "expert4", "expert2-recompute")
            if (family, layout) != ("gpt_oss", "expert2")
        ),
        *((family, "tensor2-expert2") for family in ("glm4_moe", "qwen3_next", "minimax")),
        *((family, "expert2-pipe2") for family in ("glm4_moe", "deepseek_v3")),
    ],
)
def test_mixtures_with_routing_of_their_own_share_experts(ranks, saved, family, layout):
    """Their routers, shared experts and gates are transformers', by a rule and no list of names."""
    folder, truth = saved(family)
    size = 2 if layout in ("expert2", "expert2-zero3", "expert2-recompute") else 4
    found = ranks(size).run(coverage_ranks.steps, [f"model.hf={folder}", *LAYOUTS[layout]])
    assert coverage_ranks.largest_difference(found, truth) < 1e-9


@STACKED
def test_tensor_ranks_do_not_share_experts_that_run_by_their_own_code(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings("gpt_oss")))
    run = [f"model.hf={config}", *EXPERT, "parallel.tensor=2"]
    refused = coverage_ranks.refusal(run, 4)
    assert "parallel.expert=2 with parallel.tensor=2" in refused
    assert "GptOssForCausalLM" in refused
    assert "parallel.expert" not in (coverage_ranks.refusal(run[:-1], 2) or "")


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
        found = [axis for axis in coverage.AXES if isinstance(row.get(axis), float)]
        assert all(coverage.is_right(row, axis) for axis in found), row
        trained += bool(found)
    assert trained >= 35


@pytest.mark.full
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("mixtral", marks=STACKED),
        *(
            pytest.param(x, marks=(*FULL, STACKED))
            for x in ("deepseek_v3", "gpt_oss", "qwen2_moe", "qwen3_moe", "olmoe")
        ),
    ],
)
def test_an_untrained_export_has_the_files_of_the_folder(ranks, saved, tmp_path, family):
    """Experts are stacked in the modules and apart in the files; buffers come along."""
    folder, _ = saved(family)
    degrees = EXPERT
    ranks(2).run(coverage_ranks.export, folder, str(tmp_path), degrees)
    mine = load_file(tmp_path / "out" / "model.safetensors")
    theirs = load_file(Path(folder) / "model.safetensors")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], x) for key, x in theirs.items())


@STACKED
def test_an_export_keeps_the_heads_of_further_tokens_that_its_class_ignores(ranks, saved, tmp_path):
    """DeepSeek V3 has its MTP layer in the folder as one more block, and none in transformers,
    which knows the number of that block in the published model alone."""
    folder = tmp_path / "with"
    shutil.copytree(saved("deepseek_v3")[0], folder)
    tensors = load_file(folder / "model.safetensors")
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, COUNT: 1}))
    mtp = {
        f"model.layers.{number}.{name}.weight": torch.randn(4, 8, dtype=torch.float64)
        for number in (61, given["num_hidden_layers"])
        for name in ("eh_proj", "mlp.experts.0.gate_proj")
    }
    save_file({**tensors, **mtp}, folder / "model.safetensors", metadata={"format": "pt"})
    ranks(1).run(coverage_ranks.export, str(folder), str(tmp_path), [])
    mine = load_file(tmp_path / "out" / "model.safetensors")
    assert mine.keys() == tensors.keys() | mtp.keys()
    assert all(torch.equal(mine[key], x) for key, x in mtp.items())


def test_a_way_that_casts_to_the_dtype_of_the_model_rounds_nothing():
    """As transformers' of Inkling 2's head, whose padded rows it leaves out."""

    class Casting:
        def add_tensor(self, name, key, pattern, read):
            self.read = read

        def convert(self, name, model, config):
            return {name: self.read()[:2].to(model.get_parameter(name).dtype)}

    model, stored = torch.nn.Linear(3, 2, device="meta"), torch.randn(4, 3, dtype=torch.float64)
    model.config = None
    group = StoredGroup("weight", (("weight", "key"),), Casting())
    assert torch.equal(group.convert(model, lambda key: stored)["weight"], stored[:2])


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


@pytest.mark.full
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
