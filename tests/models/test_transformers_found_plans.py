"""Plans of transformers' classes without a table: what is refused, what ranks hold and send."""

import json
import math
from dataclasses import replace

import pytest

from tests.models.coverage import ENCODERS, settings
from tests.models.found_cases import EXPERT, ROUTERS, STACKED, transformers
from tests.tells import tells
from torchdistpackage.config.load import loads
from torchdistpackage.config.packages import is_before
from torchdistpackage.errors import ConfigError
from torchdistpackage.models import transformers_found, transformers_meta
from torchdistpackage.models.shrunk_config import VOCAB, shrunk
from torchdistpackage.models.transformers_layout import shape_of_section
from torchdistpackage.models.transformers_meta import ModuleDraws
from torchdistpackage.plan.expert_plan import expert_plan
from torchdistpackage.plan.run_plan import make_plan, num_parameters, stage_loads


def plan_of(tmp_path, family: str, *overrides: str, world: int = 2, **changes: object):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(settings(family, **changes)))
    run = loads("", overrides=[f"model.hf={config}", "data.seq_len=12", *overrides])
    return make_plan(run, world)


def test_what_a_found_family_cannot_do_with_parts_of_a_sequence_names_the_module(tmp_path):
    """Its blocks are given more than activations, and no way of sharing a sequence is right."""
    run = ["parallel.tensor=2", "parallel.context=2", "parallel.sequence_parallel=true"]
    with pytest.raises(ConfigError) as met:
        plan_of(tmp_path, "xlm", *run, "parallel.tp_comm_overlap=true", world=4)
    said = " ".join(str(met.value).split())
    assert "3 problems" in said and "xlm cannot attend over parts of a sequence" in said
    assert said.count("(MultiHeadAttention)") == 2
    assert "XLMWithLMHeadModel cannot do it: only families with a table can, which are" in said


def test_a_rule_that_is_wrong_is_refused_with_the_first_module_that_differs(tmp_path, monkeypatch):
    """Heads in another order than their keys, and a gradient that nobody adds up."""
    found, every = transformers_found.find_cuts, transformers_found.CHOICES

    def with_other_heads(model, read, choices):
        cuts, width = found(model, read, choices), read.sizes.heads * read.sizes.head_dim
        name = "model.layers.1.self_attn.q_proj"
        parts = width // 4, width // 4, width // 2
        weight = replace(cuts.layers[name].weight, heads=None, parts=(parts, ()))
        wrong = replace(cuts.layers[name], weight=weight)
        return replace(cuts, layers={**cuts.layers, name: wrong})

    def without_sums(*given):
        return replace(found(*given), partial={})

    said = {
        with_other_heads: "model.layers.1.self_attn.o_proj: outputs differ by ",
        without_sums: "model.layers.3.self_attn.k_norm: gradients (model.layers.3.self_attn",
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
    shape = plan_of(tmp_path, "qwen3_moe", "parallel.tensor=2", head_dim=16).shape
    read = transformers_found.found_model(shape.given, 2)
    assert read.uncut is None and read.table.layers and not read.table.attention
    transformers_found._read.cache_clear()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "num", "heads", "keys"),
    [("glm", 3, 6, 3), ("starcoder2", 3, 9, 3), ("starcoder2", 5, 10, 5)],
)
def test_an_odd_number_of_ranks_shares_attention_by_heads(family, num, heads, keys):
    sizes = {"hidden_size": heads * 8, "num_attention_heads": heads, "num_key_value_heads": keys}
    given = settings(family, **sizes)
    read = transformers_found.found_model(given, num)
    kinds = {cut.kind for path, cut in read.table.layers.items() if path.endswith("q_proj")}
    assert read.uncut is None and kinds == {"column"}


@pytest.mark.full
@pytest.mark.parametrize("family", ["dory", "gemma3n_text"])
def test_rounding_and_an_mlp_that_compares_its_channels_hinder_no_split(family):
    """Dory magnifies rounding a thousandfold; an MLP of Gemma 3n takes its largest channels."""
    read = transformers_found.found_model(settings(family), 2)
    assert read.uncut is None and read.table.layers


@pytest.mark.few(2)
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
    assert tells(str(met.value), "8 stages", "4 blocks")


@pytest.mark.parametrize(
    ("family", "more", "said"),
    [
        ("dbrx", EXPERT[1:], "DbrxForCausalLM has none such; set expert to 1"),
        ("llama", EXPERT[1:], "LlamaForCausalLM has none such; set expert to 1"),
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


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("bert", {"is_decoder": False}, "set is_decoder to true in config.json to train"),
        ("xlm", {"causal": False}, "XLMWithLMHeadModel attends in both directions"),
        ("xlnet", {"attn_type": "bi"}, 'set attn_type to "uni" in config.json'),
        ("cpmant", {}, "use a causal language model, or model.target"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "set use_bidirectional_attention"),
        ("olmo2", {"is_causal": False}, "set is_causal to true in config.json"),
        ("llama", {"is_causal": False}, "is_causal is false, so that tokens see those"),
    ],
)
def test_what_sees_the_tokens_that_it_is_to_predict_is_refused(tmp_path, family, changes, said):
    with pytest.raises(ConfigError) as met:
        plan_of(tmp_path, family, **changes)
    assert said in str(met.value)


@pytest.mark.full
@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_are_told_to_be_decoders(tmp_path, family):
    """Each is refused by its own settings, and taken by those that its refusal names."""
    with pytest.raises(ConfigError) as met:
        plan_of(tmp_path, family, is_decoder=False)
    assert "set is_decoder to true in config.json" in str(met.value)
    shape = plan_of(tmp_path, family).shape
    assert transformers_found.found_model(shape.given).refused is None


@pytest.mark.skipif(is_before("transformers", "5"), reason="transformers 4 checks no types")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["full_attention"]}, "must be equal to the number of `layer_types` (1)"),
        ({"hidden_size": "wide"}, "Field 'hidden_size' expected int, got str"),
    ],
)
def test_settings_that_transformers_refuses_are_an_error_with_a_name(tmp_path, changes, said):
    """Those of a class whose table a trial has to read."""
    with pytest.raises(ConfigError) as met:
        plan_of(tmp_path, "smollm3", **changes)
    assert "transformers refuses the config.json" in str(met.value)
    assert said in str(met.value)


@pytest.mark.parametrize(("layers", "kinds"), [(1, ["full_attention"]), (4, None)])
def test_a_small_copy_of_one_block_has_it(layers, kinds):
    given = {**transformers.CONFIG_MAPPING["smollm3"]().to_dict(), "num_hidden_layers": layers}
    small = shrunk({**given, "layer_types": kinds or ["full_attention"] * layers})
    assert small["num_hidden_layers"] == len(small["layer_types"]) == min(layers, 2)


def test_a_module_is_drawn_by_the_rules_of_those_around_it():
    """The head of a tower for images draws its attention, which has no rule of its own."""
    given = settings("gemma3")
    given["vision_config"]["vision_use_head"] = True
    draws = ModuleDraws(given, transformers_found.found_family(given))
    path = "model.vision_tower.head.attention"
    drawn = draws.parameter(f"{path}.in_proj_weight", 0)
    bound = math.sqrt(6 / sum(drawn.shape))
    assert 0.9 * bound < drawn.abs().max() <= bound
    assert not draws.parameter(f"{path}.in_proj_bias", 0).any()


def test_a_layer_that_only_its_constructor_sets_is_drawn_in_every_block():
    """OpenAI's first GPT, all of whose blocks have one activation, does so with its matrices."""
    given = settings("openai-gpt")
    draws = ModuleDraws(given, transformers_found.found_family(given))
    blocks = [draws.parameter(f"transformer.h.{k}.mlp.c_fc.weight", 0) for k in (0, 1)]
    assert not blocks[0].equal(blocks[1])
    assert all(0.018 < float(block.std()) < 0.022 for block in blocks)


def test_a_parameter_that_nobody_sets_is_refused(monkeypatch):
    """Rather than to begin with what its memory held."""
    given = settings("openai-gpt")
    family = transformers_found.found_family(given)
    monkeypatch.setattr(transformers_meta, "_conv1d", lambda: object)
    with pytest.raises(ConfigError, match=r"c_fc.weight no initial value"):
        ModuleDraws(given, family).parameter("transformer.h.0.mlp.c_fc.weight", 0)


def test_the_vocabulary_of_a_model_that_reads_more_may_be_left_to_transformers(tmp_path):
    """As in the folders of Gemma 3 on the hub."""
    given = {"model_type": "gemma3", "text_config": {"hidden_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert loads("", overrides=[f"model.hf={tmp_path}/config.json"]).model.vocab == 262208


def test_positions_behind_the_row_of_padding_are_fewer_than_rows(tmp_path):
    """RoBERTa's first token has position pad_token_id + 1."""
    roberta = {**settings("roberta"), "max_position_embeddings": 64, "pad_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(roberta))
    assert shape_of_section({"hf": str(tmp_path)}, 8, False).num_positions == 62
