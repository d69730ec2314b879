"""Classes of transformers: docs/model_classes.md, and what is said of a class that cannot do it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.models import coverage
from tests.models.found_cases import transformers
from tests.tells import tells
from torchdistpackage.config.load import loads
from torchdistpackage.errors import ConfigError
from torchdistpackage.models import transformers_found
from torchdistpackage.models.shrunk_config import shrunk
from torchdistpackage.models.transformers_meta import known_settings
from torchdistpackage.plan.run_plan import make_plan

REFUSED = ("gemma3n", "musicgen", "musicgen_melody")
"""Of which transformers makes no model here: a package is missing, or its settings."""
_CLASS = re.compile(r"[A-Z]\w*[a-z]\w*[A-Z]\w*|\(Linear\)|falcon")
"""A name of a class, or of a family that has a table."""


def plan(tmp_path: Path, family: str, *overrides: str, length: int = 12, **changes: object) -> str:
    """Text of the refusal of a run."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(coverage.settings(family, **changes)))
    run = loads("", overrides=[f"model.hf={config}", f"data.seq_len={length}", *overrides])
    transformers_found._read.cache_clear()
    with pytest.raises(ConfigError) as met:
        make_plan(run, 2)
    return str(met.value)


def test_no_cell_of_the_page_is_an_exception():
    """Each is ok, does not apply, or the refusal that a plan gives, which names a class and what it
    has."""
    rows = [x for x in coverage.PAGE.read_text().splitlines() if x.startswith("| `")]
    assert len(rows) > 190
    for row in rows:
        _, name, kind, *cells, _ = (cell.strip() for cell in row.split("|"))
        assert len(cells) == len(coverage.AXES), row
        assert kind or name.strip("`") in REFUSED, row
        for cell in cells:
            if cell in ("ok", "ok, float32 within"):
                continue
            if cell.startswith(coverage.NOT_THERE):
                continue
            assert not re.search(r"Error|Exception|Traceback|stopped|wrong|\.\.\.", cell)
            assert _CLASS.search(cell) and len(cell) > 40, row


class Alone:
    """A pool of one rank, this process."""

    def __call__(self, size: int) -> SimpleNamespace:
        assert size == 1
        return SimpleNamespace(run=lambda work, *given: [work(*given)])


def planted(monkeypatch: Any, kind: Any, wrong: Callable[..., bool]) -> None:
    """Let a module's forward raise where `wrong(module, kwargs)`."""
    forward = kind.forward

    def raises(self, *args, **kwargs):
        if wrong(self, kwargs):
            raise IndexError("planted")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", raises)


def test_a_class_that_raises_is_refused_with_the_module_and_not_what_it_raised(
    tmp_path, monkeypatch
):
    from transformers.models.olmo2 import modeling_olmo2 as olmo2

    with monkeypatch.context() as patched:
        planted(patched, olmo2.Olmo2Model, lambda _, given: given.get("input_ids") is None)
        text = plan(tmp_path, "olmo2", "parallel.pipe=2")
        assert "Olmo2ForCausalLM does not go on from activations" in text
        assert tells(text, "block 1", "4 stops") and "planted" not in text
    with monkeypatch.context() as patched:
        planted(patched, olmo2.Olmo2MLP, lambda mlp, _: type(mlp.down_proj) is not nn.Linear)
        patched.setattr(transformers_found, "CHOICES", transformers_found.CHOICES[:1])
        text = plan(tmp_path, "olmo2", "parallel.tensor=2")
        assert "2 ranks stop in model.layers.0.mlp (Olmo2MLP)" in text and "planted" not in text
    planted(monkeypatch, olmo2.Olmo2MLP, lambda *_: True)
    axes = {axis: coverage.AXES[axis] for axis in ("data 2",)}
    transformers_found._read.cache_clear()
    (row,) = coverage.rows(Alone(), ["olmo2"], axes)  # type: ignore[arg-type]
    transformers_found._read.cache_clear()
    assert row["class"] == "Olmo2ForCausalLM"
    assert "does not run on token ids alone: it stops in model.layers.0.mlp" in row["data 2"]
    assert coverage.STOPPED not in row["data 2"] and "planted" not in row["data 2"]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("hrm_text", "model.L_module (HrmTextStack) runs its 2 blocks"),
        ("zaya", "(ZayaDecoderLayer) is given prev_router_hidden_states beside the activations"),
        ("zamba", "given original_hidden_states beside the activations, made by model.embed_tok"),
        ("mllama", "(MllamaCrossAttentionDecoderLayer) is not called in a forward of model"),
        ("roformer", "sinusoidal_pos beside the activations, made by roformer.encoder.embed_pos"),
        ("xlm", "(MultiHeadAttention) is not given what the block before it returns"),
        ("blt", "does not go on from activations in place of token ids"),
        ("hy_v4", "prev_topk_indices beside the activations, made by model.layers.0"),
    ],
)
def test_what_keeps_blocks_from_stages_is_named(tmp_path, family, said):
    assert said in plan(tmp_path, family, "parallel.pipe=2", "pipeline.microbatches=2")


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("gemma4_assistant", "its pre_projection (Linear) reads activations and key-value states"),
        pytest.param(
            *("git", "GitForCausalLM makes logits of token ids alone, and its forward no loss"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_what_token_ids_alone_do_not_run_is_refused_by_name(tmp_path, family, said):
    assert said in plan(tmp_path, family)


def test_blocks_with_shared_experts_are_refused_as_graphs_before_ranks_start(tmp_path):
    text = plan(tmp_path, "mixtral", "train.compile=blocks", "parallel.data=2", "parallel.expert=2")
    assert tells(text, "model.layers.0.mlp.experts", "MixtralForCausalLM", "auto")


def test_settings_of_which_transformers_makes_no_model_are_refused_by_its_class():
    with pytest.raises(ConfigError, match="MusicgenForCausalLM is made of MusicgenDecoderConfig"):
        known_settings(coverage.settings("musicgen"))


def test_a_reformer_trains_on_as_many_tokens_as_its_axes_have(tmp_path):
    local = {"attn_layers": ["local", "local"], "num_hidden_layers": 2}
    text = plan(tmp_path, "reformer", length=16, **local)
    assert "data.seq_len=16" in text and tells(text, "axial_pos_shape", "[3, 4]", "12 tokens")


def test_small_copies_keep_what_belongs_together():
    """Kinds of layers that read each other's, and settings by the number of a layer."""
    kinds = ["a", "a", "b"] * 4
    given = {"num_hidden_layers": 12, "layer_types": kinds, "num_kv_shared_layers": 6}
    small = shrunk({**given, "per_layer_config": {"00": {"head_dim": 64}, "01": {"head_dim": 32}}})
    assert small["layer_types"] == ["a", "b", "a", "b"] and small["num_kv_shared_layers"] == 2
    assert small["per_layer_config"] == {"0": {"head_dim": 8}}
    small = shrunk({"num_hidden_layers": 4, "layer_types": ["a", "hybrid"] * 2, "x_layer_ids": [3]})
    assert small["layer_types"].count("hybrid") == 2 and small["x_layer_ids"] == [3]
    paired = {"num_hidden_layers": 8, "layer_types": ["a", "mlp"] * 4, "n_recurrent_layers": 4}
    small = shrunk({**paired, "n_input_layers": 2, "n_output_layers": 2})
    assert small["layer_types"] == ["a"] * 4 and small["num_hidden_layers"] == 4


@pytest.mark.full
def test_every_class_has_small_settings_of_which_transformers_makes_a_model():
    for name in coverage.names():
        if name not in REFUSED:
            config = transformers.CONFIG_MAPPING[name].from_dict(coverage.settings(name))
            assert config.model_type == name
