"""A plan becomes what predict takes, and `tdp plan --time` says what its step takes."""

import json
import math
from pathlib import Path

import pytest

from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load, loads
from torchdistpackage.config.slurm import time_seconds
from torchdistpackage.models.transformers_layout import TransformersShape, weights
from torchdistpackage.plan.run_plan import make_plan, num_parameters
from torchdistpackage.plan.step_time import device_of, layout_of, run_time, sizes_of
from torchdistpackage.predict.devices import DEVICES

CONFIGS = Path(__file__).parents[2] / "configs"
SLURM = str(CONFIGS / "gpt_slurm.yaml")
H100 = DEVICES["h100-sxm"]


def planned(name: str, ranks: int, *more: str):
    run = load(str(CONFIGS / name), list(more), ranks)
    return make_plan(run, ranks)


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("model.mlp=swiglu", "model.norm=rms", "model.kv_heads=4"),
        ("model.tied=false", "model.position=learned"),
    ],
)
def test_sizes_have_the_operations_and_parameters_of_the_model(more):
    plan = planned("gpt_slurm.yaml", 16, *more)
    sizes = sizes_of(plan)
    assert plan.model is not None
    assert sizes.model_flops(1024) == pytest.approx(plan.model.flops_per_token(), rel=0.01)
    assert sizes.parameters == pytest.approx(num_parameters(plan), rel=0.02)


def test_experts_are_counted_by_those_that_a_token_meets():
    plan = planned("moe_tiny.yaml", 4)
    sizes = sizes_of(plan)
    assert plan.model is not None and sizes.num_experts > sizes.top_k
    flops = sizes.model_flops(plan.shape.seq_len)
    assert flops == pytest.approx(plan.model.flops_per_token(), rel=0.02)


def test_a_layout_has_the_blocks_and_rounds_of_the_plan():
    plan = planned("gpt_slurm.yaml", 16, "train.accumulate=2", "pipeline.partition=uniform")
    layout = layout_of(plan, 8)
    assert sum(layout.blocks) == 24 and len(layout.blocks) == 2
    assert (layout.data, layout.rounds, layout.num_microbatches) == (2, 2, 8)
    assert layout.step_tokens == 128 * 1024


def test_a_step_of_more_rounds_has_as_many_bubbles():
    one, two = (
        run_time(planned("gpt_slurm.yaml", 16, f"train.accumulate={n}"), H100).step.terms
        for n in (1, 2)
    )
    assert two["bubble"] / two["compute"] > 0.9 * one["bubble"] / one["compute"]


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


def of_transformers(folder, *more, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | settings))
    shapes = {x: w.layout.shape for x, w in weights(TransformersShape("llama", LLAMA, 32)).items()}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    keys = ("data.target=tests.train.sources:UnevenTokens", "data.args={seq_len: 32, vocab: 96}")
    more = (*keys, f"model.hf={folder}", "data.seq_len=32", *more)
    return make_plan(loads("parallel: {data: 2}", overrides=list(more)), 2)


@pytest.mark.parametrize(
    ("target", "adapts_mlp"),
    [("q_proj, v_proj", False), ("all-linear", True), ("o_proj, up_proj", True)],
)
def test_frozen_weights_are_whole_and_adapters_where_the_target_is(tmp_path, target, adapts_mlp):
    layout = layout_of(
        of_transformers(tmp_path, "parallel.zero=3", f"model.lora={{r: 4, target: [{target}]}}")
    )
    assert (layout.lora, layout.lora_mlp, layout.shards_frozen) == (4, adapts_mlp, False)


def test_terms_gpu_hours_and_the_end_of_the_job_are_printed(capsys):
    slow = ("launch.slurm.gpus-per-node=h100:8", "train.steps=100000000", "launch.slurm.time=30")
    assert main(["plan", SLURM, "--time", *slow]) == 0
    text = capsys.readouterr().out
    for words in ("step time", "predicted step on H100 SXM (h100-sxm)", "compute", "bubble"):
        assert words in text
    assert "GPU-hours" in text and "does not end within its 0.5 h" in text
    assert main(["plan", SLURM, "--time", "--device", "h100-pcie"]) == 0
    text = capsys.readouterr().out
    assert "ends within its 24 h" in text and "not checked" in text
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_device_the_summary_has_no_step_time(capsys):
    assert main(["plan", SLURM]) == 0
    assert "step time" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--time"], "--time needs a device: pass --device NAME, or name the type of GPU"),
        (["--device", "v100"], "no device 'v100' is known; name one of a100, h100-sxm"),
    ],
)
def test_a_device_that_is_absent_or_unknown_is_named(capsys, words, said):
    assert main(["plan", SLURM, *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_what_is_not_predicted_says_why(capsys):
    tiny = str(CONFIGS / "gpt_tiny.yaml")
    assert main(["plan", tiny, "--time", "--device", "a100", "precision.dtype=float64"]) == 0
    assert "float64 is not predicted; set precision.dtype" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ("gres=gpu:a100:8", "a100"),
        ("gpus-per-node=nvidia_h100_sxm:8", "h100-sxm"),
        ("gpus=mi300x:16", "mi300x"),
        ("gpus-per-node=8", None),
        ("gpus-per-node=v100:8", None),
    ],
)
def test_the_type_of_gpu_of_a_job_is_its_device(options, name):
    run = load(str(CONFIGS / "gpt_tiny.yaml"), [f"launch.slurm.{options}"])
    device = device_of(run)
    assert (device and device.name) == name


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:00:00", 3600),
        ("2-0", 172800),
        ("1-02:03:04", 93784),
        ("UNLIMITED", None),
    ],
)
def test_times_are_read_as_sbatch_does(text, seconds):
    assert time_seconds(text) == seconds
