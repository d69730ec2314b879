"""`tdp plan FOLDER --tensor N`: the plan by which a model alone is split."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from tests.parallel.auto.models import SMALL, language_model, randomised
from torchdistpackage.cli.main import main
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.config.packages import is_before
from torchdistpackage.parallel.auto import count_traffic


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("llama")
    model = language_model("llama")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.dtype = "float64"
    model.config.save_pretrained(made)
    return made


def mixtral() -> transformers.PreTrainedModel:
    sizes = {"num_local_experts": 4, "experts_implementation": "eager"}
    config = transformers.MixtralConfig(**SMALL, **sizes, architectures=["MixtralForCausalLM"])
    return randomised(transformers.MixtralForCausalLM(config))


@pytest.mark.parametrize("dtype", ["float64", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_the_forward_of_experts_is_counted_in_every_type(tmp_path, capsys, dtype):
    model = mixtral().to(getattr(torch, dtype))
    model.config.dtype = dtype
    model.config.save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--tensor", "2", "--seq-len", "5"]) == 0
    text = capsys.readouterr().out
    title = f"MixtralForCausalLM over 2 shards, torch.{dtype};"
    if is_before("transformers", "5"):  # whose experts look which of them the router chose
        assert text.startswith(f"{title} what a forward sends is not known without weights: ")
        return
    assert text.startswith(f"{title} a forward of 1 x 5 t")
    expect_sent(text, tensor_parallel(model, ["cpu"] * 2))


def expect_sent(text, split) -> None:
    """The plan's sums are those of a forward of 5 tokens."""
    with torch.no_grad(), count_traffic() as counted:
        split(torch.zeros(1, 5, dtype=torch.int64))
    assert counted.calls
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for kind, calls in counted.calls.items():
        assert f"all {kind} {calls} {counted.num_bytes[kind]:,}" in lines


def test_what_it_shows_is_held_and_sent(folder, capsys):
    assert main(["plan", str(folder), "--tensor", "2", "--seq-len", "5"]) == 0
    text = capsys.readouterr().out
    split = tensor_parallel(language_model("llama"), ["cpu"] * 2)
    expect_sent(text, split)
    held = [sum(p.nbytes for p in s.parameters()) for s in split.wrapped_model.module_shards]
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"all {min(held):,} to {max(held):,}" in lines  # of 61 tokens one has one more
    assert "2 x model.layers.*.self_attn.q_proj.weight" in text
    assert main(["plan", str(folder / "config.json"), "--tensor", "2", "--all"]) == 0
    assert "model.layers.1.self_attn.q_proj.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tensor", "5"], "llama has 4 attention heads, which 5 shards cannot share; use at"),
        ([], "a model needs the number of shards"),
        (["--tensor", "2", "--procs", "8"], "takes --seq-len and --all only"),
    ],
)
def test_what_cannot_be_is_refused(folder, capsys, arguments, text):
    assert main(["plan", str(folder), *arguments]) == 2
    assert text in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_folder_without_a_model_is_refused(tmp_path, capsys):
    assert main(["plan", str(tmp_path), "--tensor", "2"]) == 2
    assert "config.json is not there; name a folder with" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none of them"}))
    assert main(["plan", str(tmp_path), "--tensor", "2"]) == 2
    assert "describes no model of transformers" in capsys.readouterr().err
    # a model whose code lies beside it is not asked about, and does not run
    wrong = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(wrong))
    (tmp_path / "mine.py").write_text("open('ran', 'w')")
    assert main(["plan", str(tmp_path), "--tensor", "2"]) == 2
    assert "trust_remote_code" in capsys.readouterr().err
    known = {"model_type": "llama", "vocab_size": 8, "pad_token_id": 8, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({**known, "num_attention_heads": 4}))
    assert main(["plan", str(tmp_path), "--tensor", "2"]) == 2
    assert "describes no model of transformers" in capsys.readouterr().err


def test_a_folder_without_a_model_is_not_taken_for_one(tmp_path, capsys):
    assert main(["plan", str(tmp_path)]) == 2
    assert f"{tmp_path}: is a folder, not a file" in capsys.readouterr().err
