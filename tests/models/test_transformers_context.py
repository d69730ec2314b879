"""How ranks share the sequences of classes of transformers: tried on a small copy, and in steps."""

import pytest

from tests.models import coverage, coverage_ranks
from tests.models.found_cases import CONTEXT, EXPERT, FULL, PIPE, TENSOR
from torchdistpackage.models.transformers_context import found_context, try_context
from torchdistpackage.models.transformers_small import Sample, sample_ids, small_models
from torchdistpackage.parallel.context import hugging_face

WAYS = {
    "olmo3": ("parts", ()),  # windows
    "deepseek_v3": ("parts", ()),  # keys wider than values
    "gpt_oss": ("keys", ()),  # sinks
    "gemma2": ("keys", ()),  # capped scores
    "llama4_text": ("keys", ()),  # chunks
    "bloom": ("keys", ("BloomAttention",)),
    "deepseek_v32": ("keys", ("DeepseekV32Indexer", "DeepseekV32Attention")),
    "glm_moe_dsa": ("keys", ("GlmMoeDsaIndexer", "GlmMoeDsaAttention")),
    "bart": ("parts", ("BartLearnedPositionalEmbedding",)),
    "recurrent_gemma": ("parts", ("RecurrentGemmaRecurrentBlock",)),  # of no known form
}


@pytest.mark.few(3)
@pytest.mark.parametrize("family", WAYS)
def test_a_trial_says_what_needs_more_than_our_attention(family):
    way = found_context(coverage.settings(family))
    assert (way.attends, way.gathered, way.problem) == (*WAYS[family], "")


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("xlnet", "(XLNetRelativeAttention)"),
        pytest.param("xlm", "(MultiHeadAttention)", marks=FULL),
    ],
)
def test_a_class_that_no_way_serves_is_refused_with_the_module(family, module):
    assert module in found_context(coverage.settings(family)).problem


def test_a_wrong_attention_is_seen(monkeypatch):
    """One that forgets the window."""
    small = next(iter(small_models(coverage.settings("olmo3"))))
    attend = hugging_face._attend

    def forgets(*args, sliding_window=None, **more):
        return attend(*args, **more)

    monkeypatch.setattr(hugging_face, "_attend", forgets)
    way = try_context(small, Sample(sample_ids(small.config)[:1]))
    assert way.attends == "keys"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_next", CONTEXT),
        ("qwen4_exp_text", CONTEXT),  # whose indexer wants positions of each sample
        ("gpt_oss", CONTEXT),
        *(
            pytest.param(family, layout, marks=FULL)
            for family in (
                *("olmo3", "llama4_text", "mamba2", "gemma2", "bloom", "bart"),
                *("deepseek_v32", "glm_moe_dsa", "minimax", "nemotron_h"),
            )
            for layout in (CONTEXT, [*CONTEXT, "train.recompute=blocks"], ["parallel.context=3"])
        ),
        *(
            pytest.param(family, [*CONTEXT, *more], marks=FULL)
            for family in ("gpt_oss", "qwen3_next")
            for more in (PIPE, TENSOR, EXPERT[:1])
        ),
    ],
)
def test_three_steps_are_those_of_transformers(ranks, tmp_path, family, layout):
    folder, mode = str(tmp_path / "model"), coverage_ranks.MODES[0]
    ranks(1).run(coverage_ranks.make_folder, coverage.settings(family), folder)
    truth = ranks(1).run(coverage_ranks.alone, folder, 1)[0]
    size = (
        3
        if "parallel.context=3" in layout
        else 2 ** sum(x.endswith("=2") and "par" in x for x in layout)
    )
    found = ranks(size).run(coverage_ranks.steps, [f"model.hf={folder}", *layout])
    assert coverage_ranks.largest_difference(found, truth, mode) < 1e-9
