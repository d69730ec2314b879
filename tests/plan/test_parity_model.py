"""`tdp prove` of a folder of transformers: a small copy, on the axes that the model can be cut.

No torch.
"""

import json
from pathlib import Path

import pytest

from torchdistpackage.cli.main import main
from torchdistpackage.config.load import loads
from torchdistpackage.errors import ConfigError
from torchdistpackage.plan.parity_model import is_model, model_plan, with_small_copy
from torchdistpackage.plan.parity_plan import parity_run

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000,
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "llama"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(LLAMA))
    return made


def test_the_copy_is_small_and_every_axis_is_compared(folder: Path, tmp_path: Path):
    assert is_model(str(folder)) and is_model(str(folder / "config.json"))
    assert not is_model("configs/gpt_tiny.yaml")
    plan, said = model_plan(str(folder), [], tmp_path)
    assert said == []
    small = json.loads(Path(str(plan.config.model.hf)).read_text())
    assert Path(str(plan.config.model.hf)).parent == tmp_path
    assert small["vocab_size"] == 256 and small["hidden_size"] == 32
    assert small["num_key_value_heads"] < small["num_attention_heads"]
    layouts = [axes for axes, _ in parity_run(plan).layouts]
    assert {"data": 2} in layouts and {"data": 2, "pipe": 2, "tensor": 2} in layouts
    assert len(layouts) == 7


def test_the_vocabulary_of_text_inside_other_settings_holds_every_byte(tmp_path: Path):
    whole = tmp_path / "config.json"
    text = {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 4}
    whole.write_text(json.dumps({"model_type": "qwen4_exp", "text_config": text}))
    run = loads(f"model: {{hf: {whole}}}", overrides=["data.seq_len=16"])
    small = with_small_copy(run, tmp_path)
    assert json.loads(Path(str(small.model.hf)).read_text())["text_config"]["vocab_size"] == 256


def test_all_parts_that_read_token_ids_hold_every_byte(tmp_path: Path):
    whole = tmp_path / "config.json"
    encoder = {"vocab_size": 260, "hidden_size": 64}
    sizes = {"vocab_size": 260, "vocab_size_per_layer_input": 260, "decoder_vocab_size": None}
    settings = {"model_type": "blt", "encoder_config": encoder, **sizes}
    whole.write_text(json.dumps(settings))
    run = loads(f"model: {{hf: {whole}}}", overrides=["data.seq_len=16"])
    small = json.loads(Path(str(with_small_copy(run, tmp_path).model.hf)).read_text())
    assert small["encoder_config"]["vocab_size"] == small["vocab_size_per_layer_input"] == 256
    assert small["decoder_vocab_size"] is None


def test_an_axis_that_does_not_fit_is_left_out_and_said(folder: Path, tmp_path: Path):
    (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    plan, said = model_plan(str(folder), [], tmp_path)
    assert [line.partition(":")[0] for line in said] == ["left out parallel.pipe=2"]
    assert "blocks" in said[0] and plan.config.parallel.pipe == 1


def test_degrees_that_are_given_are_those_compared(folder: Path, tmp_path: Path):
    plan, _ = model_plan(str(folder), ["parallel.tensor=2"], tmp_path)
    assert [axes for axes, _ in parity_run(plan).layouts] == [{"tensor": 2}]
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        model_plan(str(folder), ["parallel.tensor=2"], tmp_path)


def test_what_is_no_model_is_refused_once(folder: Path, tmp_path: Path, capsys):
    (folder / "config.json").write_text("{")
    assert main(["prove", str(folder)]) == 2
    assert capsys.readouterr().err.count("cannot be read") == 1
    (folder / "config.json").unlink()
    assert main(["prove", str(folder)]) == 2
    assert "has no config.json" in " ".join(capsys.readouterr().err.split())


@pytest.mark.full
def test_a_right_model_prints_one_line(folder: Path, capsys):
    assert main(["prove", str(folder), "parallel.data=2"]) == 0
    assert capsys.readouterr().out.strip().endswith("in float64: data 2")
