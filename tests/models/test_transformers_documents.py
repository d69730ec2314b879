"""How classes of transformers keep packed documents apart: one changes nothing of another."""

import json

import pytest
import torch
from torch import nn

from tests.models import coverage, coverage_ranks
from tests.models.found_cases import FULL, transformers
from torchdistpackage.errors import ConfigError
from torchdistpackage.models.document_rows import DocumentRows
from torchdistpackage.models.transformers_documents import found_documents, try_documents
from torchdistpackage.models.transformers_layout import TransformersShape
from torchdistpackage.models.transformers_small import small_models

WAYS = {"olmo2": "positions", "llama4_text": "positions", "gpt_oss": "rows", "mamba2": "rows"}
WAYS |= {"qwen3_next": "rows"}


@pytest.mark.few(2)
@pytest.mark.parametrize("family", WAYS)
def test_a_trial_says_how_documents_are_kept_apart(family):
    """Positions make no mask in every class, and states do not ask for them."""
    way = found_documents(coverage.settings(family))
    assert (way.by, way.problem) == (WAYS[family], "")


def test_a_class_that_sees_its_neighbours_in_a_batch_is_refused_by_name(monkeypatch):
    from transformers.models.olmo2 import modeling_olmo2 as olmo2

    forward = olmo2.Olmo2MLP.forward

    def mixing(self, x):
        return forward(self, x) + x.mean()

    small = next(iter(small_models(coverage.settings("olmo2"))))
    monkeypatch.setattr(olmo2.Olmo2MLP, "forward", mixing)
    way = try_documents(small)
    assert way.by == "not" and "Olmo2ForCausalLM" in way.problem


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        *(
            pytest.param(x, marks=FULL)
            for x in ("olmo2", "gpt_oss", "mamba2", "llama4_text", "deepseek_v3", "nemotron_h")
        ),
    ],
)
def test_a_document_leaves_no_bit_of_anothers_gradients(ranks, tmp_path, family):
    folder = str(tmp_path / "model")
    ranks(1).run(coverage_ranks.make_folder, coverage.settings(family), folder)
    assert ranks(1).run(coverage_ranks.bits_that_leak, folder) == [[]]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mamba2", ["parallel.pipe=2", "pipeline.microbatches=2"]),
        ("bloom", ["parallel.tensor=2"]),
        *(
            pytest.param(family, layout, marks=FULL)
            for family in ("olmo2", "gpt_oss", "granitemoehybrid")
            for layout in (
                ["parallel.tensor=2"],
                ["parallel.data=2", "parallel.zero=3"],
                ["parallel.pipe=2", "pipeline.microbatches=2", "train.recompute=blocks"],
            )
        ),
        pytest.param("olmo2", ["parallel.context=2"], marks=FULL),
        pytest.param("llama4_text", ["parallel.context=2"], marks=FULL),
    ],
)
def test_three_steps_are_those_of_each_document_alone(ranks, tmp_path, family, layout):
    folder = str(tmp_path / "model")
    ranks(1).run(coverage_ranks.make_folder, coverage.settings(family), folder)
    given = folder, 1, coverage_ranks.STEPS, 1.0, coverage_ranks.MODES[0], True
    truth = ranks(1).run(coverage_ranks.alone, *given)[0]
    run = [f"model.hf={folder}", *coverage.AXES["packed documents"], *layout]
    found = ranks(2).run(coverage_ranks.steps, run)
    assert coverage_ranks.largest_difference(found, truth) < 1e-9


def test_rows_are_as_long_as_the_longest_document_and_come_back():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
    rows, x = DocumentRows(positions), torch.arange(1, 13).view(2, 6)
    apart = rows.apart(x)
    assert apart.tolist() == [
        [1, 2, 3, 0, 0],
        [4, 5, 0, 0, 0],
        [6, 0, 0, 0, 0],
        [7, 0, 0, 0, 0],
        [8, 9, 10, 11, 12],
    ]
    assert rows.joined((apart, apart * 2))[1].equal(x * 2)
    wide = torch.randn(2, 6, 3, requires_grad=True)
    nn.functional.silu(rows.joined(rows.apart(wide))).sum().backward()
    expected = torch.autograd.grad(nn.functional.silu(wide).sum(), wide)[0]
    assert wide.grad is not None and wide.grad.equal(expected)


@pytest.mark.parametrize("cut", [["parallel.context=2"], ["parallel.tensor=2", "sequence"]])
def test_rows_of_their_own_are_refused_on_parts_of_a_sequence(tmp_path, cut):
    from tests.models.test_transformers_found_plans import plan_of

    cut = [
        x.replace("sequence", "parallel.sequence_parallel=true") if x == "sequence" else x
        for x in cut
    ]
    masks = ["data.document_masks=true", "data.name=jsonl", f"data.path={tmp_path}/x.jsonl"]
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "a"}))
    with pytest.raises(ConfigError) as met:
        plan_of(tmp_path, "mamba2", *cut, *masks, f"data.tokenizer={tmp_path}")
    assert "Mamba2ForCausalLM" in str(met.value) and "row of its own" in " ".join(
        str(met.value).split()
    )


def test_families_with_distances_need_no_trial():
    settings = transformers.BloomConfig().to_dict()
    assert TransformersShape("bloom", settings, 8).documents_way.by == "rows"
