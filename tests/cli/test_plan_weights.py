"""`tdp plan` of a run that begins with the weights of a transformers folder."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from torchdistpackage.cli.main import main

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 261,
    "tie_word_embeddings": True,
}
BLOCK = {
    "input_layernorm": (16,),
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.v_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "post_attention_layernorm": (16,),
    "mlp.gate_proj": (24, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}
SHAPES = {
    "model.embed_tokens.weight": (261, 16),
    "model.norm.weight": (16,),
    **{f"model.layers.{i}.{k}.weight": shape for i in (0, 1) for k, shape in BLOCK.items()},
}


@pytest.fixture
def run(tmp_path: Path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    held = {key: np.zeros(shape, np.float16) for key, shape in SHAPES.items()}
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "run.yaml").write_text(f"model: {{weights: {tmp_path}}}\ndata: {{seq_len: 32}}\n")
    return ["plan", str(tmp_path / "run.yaml"), "precision.dtype=bf16", "parallel.zero=1", "--all"]


def held(text: str) -> list[str]:
    """The row of pipe index 0: parameters, then MiB of weights, gradients, optimizer and all."""
    lines = text.splitlines()
    return lines[next(i for i, x in enumerate(lines) if x.startswith("pipe  param")) + 1].split()


def test_parameters_and_bytes_are_those_of_the_folder(run, capsys):
    number = sum(int(np.prod(shape)) for shape in SHAPES.values())
    assert main([*run, "precision.weights=bf16", "parallel.data=2"]) == 0
    said = capsys.readouterr().out
    assert f"{number:,} parameters" in said
    row = held(said)
    weights, gradients, optimizer = 2 * number, 4 * number, 12 * -(-number // 2)
    shown_mib = [float(cell) for cell in row[2:5]]
    assert shown_mib == pytest.approx(
        [x / 2**20 for x in (weights, gradients, optimizer)], abs=6e-4
    )


def test_each_of_four_ranks_holds_its_half_of_two_key_value_heads(run, capsys):
    assert main([*run, "parallel.tensor=4"]) == 0
    row = held(capsys.readouterr().out)
    norms, table = 5 * 16, 66 * 16
    attention, mlp = 4 * 16 + 2 * 4 * 16 + 4 * 16, 3 * 6 * 16
    assert int(row[1].replace(",", "")) == norms + table + 2 * (attention + mlp)


def test_what_the_folder_lacks_is_refused_before_anything_starts(run, tmp_path, capsys):
    held = {key: np.zeros(shape, np.float16) for key, shape in SHAPES.items() if "k_p" not in key}
    save_file(held, tmp_path / "model.safetensors")
    assert main(run) == 2
    said = capsys.readouterr().err
    assert "model.weights: " in said and "2 of 20 tensors differ" in said
    for layer in (0, 1):
        assert f"model.layers.{layer}.self_attn.k_proj.weight is missing" in said


def test_all_sizes_that_cannot_be_split_are_listed_at_once(run, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(
        "model: {heads: 6, kv_heads: 4, dim: 20, mlp_hidden: 3}\n"
        "parallel: {tensor: 4, sequence_parallel: true}\ndata: {seq_len: 30}\n"
    )
    assert main(["plan", str(tmp_path / "run.yaml")]) == 2
    said = capsys.readouterr().err
    for text in (
        "4 problems",
        "model.heads=6 is not a multiple of model.kv_heads=4; set kv_heads to 3 or 6",
        "model.dim=20 is not a multiple of model.heads=6",
        "model.mlp_hidden=3 is too narrow to give each of parallel.tensor=4 ranks a part",
        "data.seq_len=30 cannot be split over parallel.tensor=4 ranks",
    ):
        assert text in said


@pytest.mark.parametrize("key", ["hf", "weights"])
@pytest.mark.parametrize("kind", ["LlamaForSequenceClassification", "LlamaModel"])
def test_a_folder_of_another_kind_of_model_is_named(tmp_path, capsys, kind, key):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 256}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=False)
    getattr(transformers, kind)(config).save_pretrained(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(f"model: {{{key}: {tmp_path}/model}}\n")
    assert main(["plan", str(tmp_path / "run.yaml")]) == 2
    said = capsys.readouterr().err
    assert f"holds {kind}, according to its config.json" in said
    assert "not a causal language model" in said
    assert "lm_head" not in said
