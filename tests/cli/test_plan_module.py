"""`tdp plan FOLDER --tensor N`: the plan by which a model alone is split."""

from __future__ import annotations

import json
import math
from unittest.mock import patch

import pytest
import torch
import transformers

from tests.parallel.auto.models import SMALL, language_model, randomised
from torchdistpackage.cli.main import main
from torchdistpackage.comm.flight_recorder import OPERATION, SHAPE, recorder
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.config.packages import is_before
from torchdistpackage.models.transformers_layout import shape_of_section
from torchdistpackage.models.transformers_model import stage


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


def forward_of_a_run(folder: str, dtype: str) -> tuple[int, int, int, int]:
    """(sums, their bytes, gathers, bytes of parameters) of this rank in a forward of 5 tokens."""
    tpc.setup_process_groups([("tensor", 2)])
    shape = shape_of_section({"hf": folder}, 5, False, 2)
    made = stage(shape, group=tpc.get_group("tensor"), dtype=getattr(torch, dtype))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
        with patch.object(recorder, "_ring", []):
            made(torch.zeros(1, 5, dtype=torch.int64))
            ring = recorder._ring
    sums = [call for call in ring if call[OPERATION] == "all_reduce"]
    width = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    num_bytes = sum(math.prod(call[SHAPE]) * width for call in sums)
    gathers = sum(call[OPERATION] == "all_gather" for call in ring)
    return len(sums), num_bytes, gathers, sum(p.nbytes for p in made.parameters())


def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def expect_forward(text: str, of_ranks: list[tuple[int, int, int, int]]) -> None:
    """What a plan shows is what ranks of a run hold and send."""
    calls, num_bytes, gathers, _ = of_ranks[0]
    held = [held for *_, held in of_ranks]
    lines = lines_of(text)
    assert f"all sum {calls} {num_bytes:,}" in lines
    assert sum(int(line.split()[-2]) for line in lines if line.startswith("all gather")) == gathers
    low, high = min(held), max(held)
    assert (f"all {low:,}" if low == high else f"all {low:,} to {high:,}") in lines


@pytest.mark.parametrize("dtype", ["float64", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_the_forward_of_experts_is_counted_in_every_type(tmp_path, capsys, ranks, dtype):
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
    expect_forward(text, ranks(2).run(forward_of_a_run, str(tmp_path), dtype))


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.full)])
def test_it_shows_what_a_run_holds_and_sends(tmp_path, capsys, ranks, tied):
    model = language_model("llama", tie_word_embeddings=tied)
    model.config.architectures, model.config.dtype = ["LlamaForCausalLM"], "float64"
    model.config.save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--tensor", "2", "--seq-len", "5"]) == 0
    text = capsys.readouterr().out
    expect_forward(text, ranks(2).run(forward_of_a_run, str(tmp_path), "float64"))
    assert "as tdp train splits llama" in text
    assert "2 x model.layers.*.self_attn.q_proj.weight" in text
    assert any(
        line.startswith(f"model.embed_tokens.weight 61 x 24 dim {0 if tied else 1} ")
        for line in lines_of(text)
    )
    assert main(["plan", str(tmp_path / "config.json"), "--tensor", "2", "--all"]) == 0
    assert "model.layers.1.self_attn.q_proj.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "such as --tensor 2"),
        (["--tensor", "2", "--procs", "8"], "goes with --seq-len and --all only"),
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
