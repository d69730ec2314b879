"""`tdp plan FOLDER --tensor N` of a model that no table splits."""

from __future__ import annotations

import transformers

from tests.parallel.auto.models import language_model
from tests.tells import tells
from torchdistpackage.cli.main import main


def test_a_model_without_a_table_is_shown_by_rules(tmp_path, capsys):
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=36,
        architectures=["BertForMaskedLM"],
    )
    config.save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--tensor", "2"]) == 0
    assert "by rules, as it has no table: bert: BertLM" in capsys.readouterr().out


def test_more_ranks_than_heads_are_refused(tmp_path, capsys):
    model = language_model("llama")
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    assert main(["plan", str(tmp_path), "--tensor", "5"]) == 2
    text = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert tells(text, "4 attention", "5 shards")
