"""`model.hf` before ranks start: what a plan says of it, and all that it refuses."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.tells import tells
from torchdistpackage.cli.main import main
from torchdistpackage.config.check import absent_files, wrong_files
from torchdistpackage.config.errors import ConfigErrors
from torchdistpackage.config.load import loads
from torchdistpackage.errors import ConfigError
from torchdistpackage.families.table import Settings, Sizes, Weights
from torchdistpackage.models.transformers_layout import (
    layouts,
    piece_parameters,
    shape_of_section,
    split_table,
)
from torchdistpackage.models.transformers_numbers import piece_costs
from torchdistpackage.plan.run_plan import (
    make_plan,
    num_parameters,
    num_trained,
    stage_loads,
    too_long,
)

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 300, "n_embd": 16, "n_layer": 3, "n_head": 4}


def named(folder: Path, **changes: object) -> str:
    """A config.json of a Llama with these settings; None: without it."""
    settings = {**LLAMA, **changes}
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    return str(path)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config = loads("{}", overrides=list(overrides))
        parallel = config.parallel
        make_plan(config, parallel.pipe * parallel.tensor)
    return str(caught.value)


def folder_of(folder: Path, **changes: object) -> dict[str, np.ndarray]:
    """Writes a folder with the weights of the model, but for changes; None: left out."""
    shape = shape_of_section({"hf": named(folder)}, 8, False)
    held = {name: np.zeros(x.shape, np.float32) for name, x in layouts(shape).items()}
    for name, value in changes.items():
        held[name.replace("__", ".")] = value
    held = {name: value for name, value in held.items() if value is not None}
    save_file(held, folder / "model.safetensors")
    return held


def test_a_table_is_built_once(tmp_path, monkeypatch):
    """Whatever is read of it, in whatever order."""
    shape = shape_of_section({"hf": named(tmp_path)}, 8, False)
    family, built = shape.kind, list[str]()

    def block(w: Weights, s: Settings, n: Sizes) -> None:
        built.append(w.prefix)
        family.block(w, s, n)

    monkeypatch.setitem(vars(shape), "kind", replace(family, block=block))
    first = layouts(shape)
    split_table(shape)
    assert piece_costs(shape)[0] > 0 and sum(piece_parameters(shape)) > 0
    assert layouts(shape) == first
    assert built == [f"model.layers.{index}." for index in range(3)]


def test_all_that_a_model_cannot_do_is_said_at_once(tmp_path):
    text = refusal(
        f"model.hf={named(tmp_path)}",
        *("parallel.tensor=4", "parallel.pipe=4"),
    )
    assert text.startswith("2 problems")
    assert tells(text, "6 heads", "3 key-value")
    assert "parallel.tensor=4 ranks, each of which needs whole heads" in text
    assert "set tensor to 3" in text
    assert tells(text, "4 stages", "3 blocks", "LlamaForCausalLM")


@pytest.mark.parametrize("tensor", [3, 6])
def test_ranks_that_share_key_heads_evenly_are_taken(tmp_path, tensor):
    config = loads("{}", overrides=[f"model.hf={named(tmp_path)}", f"parallel.tensor={tensor}"])
    assert make_plan(config, tensor).world_size == tensor


@pytest.mark.parametrize("tensor", [2, 4, 5, 7])
def test_others_are_refused(tmp_path, tensor):
    text = refusal(f"model.hf={named(tmp_path)}", f"parallel.tensor={tensor}")
    assert f"cannot be shared by parallel.tensor={tensor} ranks" in text


def test_a_fused_key_head_is_not_shared(tmp_path):
    falcon = {"multi_query": True, "num_attention_heads": 4, "head_dim": None}
    path = named(tmp_path, model_type="falcon", **falcon)
    assert "falcon with 4 heads of 1 key-value heads" in refusal(
        f"model.hf={path}", "parallel.tensor=2"
    )


def test_learned_positions_end(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**GPT2, "n_positions": 12}))
    text = refusal(f"model.hf={path}", "data.seq_len=16")
    assert "data.seq_len=16, but positions are learned for 12" in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "t5"}, "model_type is 't5', and transformers"),
        ({"model_type": "llama17"}, "model_type is 'llama17', which transformers"),
        (
            {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}},
            "the code that its auto_map names (modeling_own.Own) is not run",
        ),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        (
            {"hidden_size": "wide", "initializer_range": "small", "mlp_bias": 3},
            "hidden_size is 'wide', which is not a size; mlp_bias is 3; use true or false; "
            "initializer_range is 'small', which is not a number",
        ),
        ({"num_attention_heads": 0, "head_dim": None}, "it has no attention heads"),
        ({"num_key_value_heads": 4}, "6 heads cannot share 4 key-value heads evenly"),
        ({"num_hidden_layers": 0}, "its size layers is 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1, which is not a size"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ({"vocab_size": None}, "vocab_size"),
        ({"pad_token_id": 300}, "pad_token_id is 300, but the vocabulary has 300 tokens"),
        (
            {"model_type": "gpt2", "n_head": 4, "n_embd": 16, "add_cross_attention": True},
            "add_cross_attention is true",
        ),
        ({"model_type": "opt", "layerdrop": 0.1, "head_dim": None}, "layerdrop is 0.1"),
        (
            {"model_type": "opt", "word_embed_proj_dim": 8, "head_dim": None},
            "word_embed_proj_dim is 8",
        ),
        (
            {"model_type": "bloom", "pretraining_tp": 2, "slow_but_exact": True},
            "slow_but_exact multiplies by slices of whole weights",
        ),
    ],
    ids=str,
)
def test_what_is_no_model_that_can_be_trained_is_refused(tmp_path, changes, says):
    assert says in refusal(f"model.hf={named(tmp_path, **changes)}")


def test_keys_that_would_not_be_read_are_refused(tmp_path):
    hf = f"model.hf={named(tmp_path)}"
    assert "model.layers, model.dropout has no effect" in refusal(
        hf, "model.layers=2", "model.dropout=0.1"
    )
    assert "and model.name=gpt exclude each other" in refusal(hf, "model.name=gpt")
    assert "model.target=a:b exclude each other" in refusal(hf, "model.target=a:b")
    assert "has no effect without model.target" in refusal(hf, "model.args={a: 1}")
    assert "the number 299, but" in refusal(hf, "model.vocab=299")
    assert "no such folder" in refusal(f"model.hf={tmp_path / 'lost'}")


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path):
    words = {f"w{i}": i for i in range(301)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    (tmp_path / "text.txt").write_text("w1 w2\n" * 50)
    data = f"data={{name: text, path: {tmp_path}/text.txt, tokenizer: {tmp_path}}}"
    config = loads("{}", overrides=[f"model.hf={named(tmp_path)}", data])
    (problem,) = wrong_files(config)
    assert problem.path == "data.tokenizer"
    assert tells(problem.text, "301 ids", "model.vocab", "300")


def test_a_plan_says_what_goes_with_what(tmp_path, capsys):
    run = tmp_path / "run.yaml"
    run.write_text(f"model: {{hf: {named(tmp_path)}}}\nparallel: {{pipe: 2, tensor: 3}}\n")
    assert main(["plan", str(run), "--all"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert tells(shown, "tensor 1, 3, 6", "6 heads", "3 key-value")
    assert "pipe up to 3 stages, of whole blocks" in shown
    assert "sequence_parallel yes" in shown
    shape = shape_of_section({"hf": named(tmp_path)}, 8, False)
    count = sum(np.prod(x.shape) for x in layouts(shape).values())
    assert f"{count:,} parameters" in shown


MADE_FOR = {
    "llama, by default": ({}, 2048),
    "mistral, by default": ({"model_type": "mistral"}, 131072),
    "plain": ({"max_position_embeddings": 64}, 64),
    "linear": (
        {"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 4.0}},
        256,
    ),
    "llama3": (
        {
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
        131072,
    ),
    "yarn, counted before": (
        {
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
            },
        },
        256,
    ),
    "no numbers": (
        {"max_position_embeddings": 64, "rope_scaling": {"factor": "4", "type": "linear"}},
        64,
    ),
    "alibi": ({"model_type": "falcon", "num_attention_heads": 4, "alibi": True}, 1 << 20),
    "bloom": ({"model_type": "bloom", "num_attention_heads": 4}, 1 << 20),
}


@pytest.mark.parametrize("case", MADE_FOR)
def test_sequences_longer_than_positions_are_made_for_are_told_of(tmp_path, case):
    changes, longest = MADE_FOR[case]
    hf = f"model.hf={named(tmp_path, **changes)}"
    plans = [
        make_plan(loads("{}", overrides=[hf, f"data.seq_len={length}"]), 1)
        for length in (longest, longest + 1)
    ]
    fits, beyond = map(too_long, plans)
    assert fits is None
    if longest == 1 << 20:  # distances of any length
        assert beyond is None
    else:
        assert beyond is not None
        assert beyond.startswith(f"data.seq_len={longest + 1}, but the positions of {tmp_path}/")
        assert f"are made for {longest} tokens" in beyond
        assert f"set seq_len to {longest} or less" in beyond


def test_a_plan_warns_of_sequences_that_are_too_long(tmp_path, capsys):
    run = tmp_path / "run.yaml"
    run.write_text(f"model: {{hf: {named(tmp_path, max_position_embeddings=64)}}}\n")
    assert main(["plan", str(run), "data.seq_len=65"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "warning data.seq_len=65, but the positions of" in said
    assert main(["plan", str(run), "data.seq_len=64"]) == 0
    assert "warning" not in capsys.readouterr().out


# -- adapters --------------------------------------------------------------------------------

NORMS = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"


def test_adapters_on_what_cannot_have_them_are_refused_with_all_else(tmp_path):
    folder_of(tmp_path)
    wrong = "query, q_proj, 2.input_layernorm, 3.mlp.up_proj"
    hf = f"model.hf={tmp_path}"
    text = refusal(hf, f"model.lora.target=[{wrong}]", "parallel.pipe=4")
    assert text.startswith("4 problems")
    assert "4 stages for the 3 blocks" in text
    assert ": llama has no layer query" in text
    assert "2.input_layernorm of llama is not a linear layer, and only linear layers and" in text
    assert f"llama has no layer 3.mlp.up_proj; its linear layers are {NORMS}, lm_head" in text
    text = refusal(hf, "model.lora.target=[all-linear, q_proj]")
    assert "all-linear stands for all linear layers; leave the others out" in text


def test_what_a_model_cannot_do_is_said_with_the_lines_of_the_file(tmp_path):
    folder_of(tmp_path)
    text = "model:\n  hf: {}\n  lora:\n    target: [query]\nparallel: {{tensor: 4}}\n"
    with pytest.raises(ConfigErrors) as caught:
        make_plan(loads(text.format(tmp_path), "run.yaml"), 4, "run.yaml")
    found = [(p.file, p.line, p.path) for p in caught.value.problems]
    assert found == [("run.yaml", 4, "model.lora.target"), ("run.yaml", 5, "parallel.tensor")]


def test_a_folder_of_adapters_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    text = refusal(f"model.hf={tmp_path}", "model.lora.target=[q_proj]")
    assert (
        "it has peft's adapter_config.json, which is adapters without their model; name the" in text
    )


def test_a_tied_head_has_no_adapter(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2))
    shape = shape_of_section({"hf": str(path)}, 8, False)
    held = {name: np.zeros(x.shape, np.float32) for name, x in layouts(shape).items()}
    save_file(held, tmp_path / "model.safetensors")
    text = refusal(f"model.hf={tmp_path}", "model.lora.target=[lm_head]")
    assert tells(text, "lm_head", "gpt2")


def test_a_plan_tells_what_is_trained_and_what_it_takes(tmp_path, capsys):
    folder_of(tmp_path)
    adapters = ["model.lora={r: 2, target: [q_proj, 2.mlp.down_proj]}"]
    overrides = [f"model.hf={tmp_path}", "parallel.pipe=2", "parallel.tensor=3"]
    every, some = (make_plan(loads("{}", overrides=[*overrides, *x]), 6) for x in ([], adapters))
    q, down = 2 * (16 + 24), 2 * (22 + 16)
    assert num_trained(some) == 3 * q + down
    first, last = stage_loads(some)
    # blocks 0 and 1; of each pair of matrices one is whole, the other cut over 3 ranks
    assert first.num_trained == 2 * (2 * 16 + 2 * 8)
    assert last.num_trained == (2 * 16 + 2 * 8) + (2 * 8 + 2 * 16)
    assert first.memory.gradients_bytes == 4 * first.num_trained
    assert first.memory.optimizer_bytes == 8 * first.num_trained
    assert first.num_parameters == stage_loads(every)[0].num_parameters + first.num_trained
    assert first.memory.weights_bytes == 4 * first.num_parameters
    (tmp_path / "run.yaml").write_text("{}")
    assert main(["plan", str(tmp_path / "run.yaml"), *overrides, *adapters, "--all"]) == 0
    said = capsys.readouterr().out
    whole = num_parameters(some)
    assert f"{whole:,} parameters, of which 316 ({316 / whole:.2%}) are trained" in said


def test_packages_that_are_missing_are_said_before_the_run(tmp_path, monkeypatch):
    folder_of(tmp_path)
    config = loads("{}", overrides=[f"model.hf={tmp_path}", "model.lora.target=[q_proj]"])
    assert absent_files(config) == []
    monkeypatch.setitem(sys.modules, "peft", None)
    (problem,) = absent_files(config)
    assert problem.path == "model.lora.target"
    assert problem.text.startswith("needs peft, which is not installed; install the extra hf: pip")


@pytest.mark.parametrize("command", [["eval", "--data"], ["generate", "--prompt"]], ids=str)
def test_packages_that_are_too_old_are_said_before_ranks_load_a_folder(
    tmp_path, monkeypatch, capsys, command
):
    folder_of(tmp_path)
    named(tmp_path, model_type="mistral")  # of the same names; a Llama is our own GPT
    monkeypatch.setattr("torchdistpackage.config.packages.version", lambda _: "4.55.0")
    assert main([command[0], str(tmp_path), command[1], str(tmp_path / "config.json")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert tells(said, "model.hf", "transformers 4.56", "transformers 4.55.0")


def test_a_model_may_have_no_padding_whatever_its_family_has_by_default(tmp_path):
    path = named(tmp_path, model_type="gemma2")
    settings = json.loads(Path(path).read_text()) | {"pad_token_id": None}
    Path(path).write_text(json.dumps(settings))
    assert shape_of_section({"hf": path}, 8, False).sizes.padding is None
