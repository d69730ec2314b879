"""A plan becomes what predict takes, and `tdp plan --time` says what its step takes."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from torchdistpackage.cli.main import main
from torchdistpackage.config.load import load, loads
from torchdistpackage.config.slurm import time_seconds
from torchdistpackage.launch.slurm.job import job_shape
from torchdistpackage.models.transformers_layout import TransformersShape, weights
from torchdistpackage.plan.run_plan import local_procs, make_plan, num_parameters
from torchdistpackage.plan.step_time import device_of, layout_of, run_time, sizes_of, unpredicted
from torchdistpackage.plan.traffic import microbatch
from torchdistpackage.predict.collectives import Fabric
from torchdistpackage.predict.devices import DEVICES, Fit
from torchdistpackage.predict.layer import LayerCosts
from torchdistpackage.predict.links import LinkModel

CONFIGS = Path(__file__).parents[2] / "configs"
SLURM = str(CONFIGS / "gpt_slurm.yaml")
H100 = DEVICES["h100-sxm"]
ONE_FLOPS = replace(
    H100,
    matmul_times={"float32": ((1.0, 1.0),)},
    memory_bytes_per_s=math.inf,
    fit=Fit(1.0, 1.0, 1.0),
    is_host=True,
)
"""A device that takes a second for an operation of a matmul, and no time for anything else."""
FREE = Fabric(LinkModel(), LinkModel(), 8)


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
    assert sizes.forward_flops(1024) == sum(plan.model.piece_costs())
    # norms, biases and positions are left out
    assert sizes.parameters == pytest.approx(num_parameters(plan), rel=0.02)


def stated_and_priced(plan):
    """The operations of a rank's forward if it had all stages: as layers state them, and as a step
    is priced."""
    sizes, layout = sizes_of(plan), replace(layout_of(plan), attention="unfused")
    costs = LayerCosts(sizes, layout, ONE_FLOPS, FREE)
    layers = plan.model.layer_numbers(range(len(plan.pieces)), microbatch(plan, 0))
    priced = sizes.layers * costs.block().forward + costs.head().forward
    return sum(each.flops for each in layers), priced


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_step_is_priced_by_the_operations_that_layers_state(path):
    run = load(str(path), [])
    ranks = job_shape(run).world_sizes[0] if run.launch.slurm else local_procs(run)
    stated, priced = stated_and_priced(make_plan(run, ranks))
    assert priced == pytest.approx(stated, rel=1e-9)


def test_a_layout_has_the_blocks_and_rounds_of_the_plan():
    plan = planned("gpt_slurm.yaml", 16, "train.accumulate=2", "pipeline.partition=uniform")
    layout = layout_of(plan, 8)
    assert sum(layout.blocks) == 24 and len(layout.blocks) == 2
    assert (layout.data, layout.rounds, layout.num_microbatches) == (2, 2, 8)
    assert layout.step_tokens == 128 * 1024


def test_ranks_are_as_far_apart_as_the_order_of_the_axes_says():
    """On nodes of 8 eight replicas of 2 stages: data crosses nodes unless it is inside pipe."""

    def terms(order: str) -> dict[str, float]:
        more = ("parallel.data=8", "parallel.pipe=2", "parallel.tensor=1", "data.global_batch=256")
        plan = planned("gpt_slurm.yaml", 16, *more, f"parallel.order={order}")
        return dict(run_time(plan, H100, 8).step.terms)

    outside = terms("[data, pipe, context, tensor]")
    inside = terms("[pipe, data, context, tensor]")
    assert outside["exposed data"] > 1.5 * inside["exposed data"]
    assert outside["exposed pipe"] < inside["exposed pipe"]


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
    config = LLAMA | settings
    (folder / "config.json").write_text(json.dumps(config))
    shape = TransformersShape(config["model_type"], config, 32)
    shapes = {x: w.layout.shape for x, w in weights(shape).items()}
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


QWEN3 = {"model_type": "qwen3", "head_dim": 16}


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("settings", [{}, QWEN3, {"model_type": "gemma2", "head_dim": 16}])
def test_so_is_one_of_transformers(tmp_path, settings, tensor):
    plan = of_transformers(
        tmp_path, f"parallel={{data: {2 // tensor}, tensor: {tensor}}}", **settings
    )
    stated, priced = stated_and_priced(plan)
    assert priced == pytest.approx(stated, rel=1e-9)


def test_norms_of_a_block_are_those_of_its_parameters(tmp_path):
    llama, qwen, gemma = (
        sizes_of(of_transformers(tmp_path, **more))
        for more in ({}, QWEN3, {"model_type": "gemma2", "head_dim": 16})
    )
    assert (llama.norms, llama.qk_norm, llama.norm, llama.gated) == (2, False, "rms", True)
    assert (qwen.norms, qwen.qk_norm) == (2, True)
    assert (gemma.norms, gemma.qk_norm, gemma.gated) == (4, False, True)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"sliding_window": 16}, "the last 16 of 32 tokens (sliding_window)"),
        ({"sliding_window": 32}, None),
        ({**QWEN3, "sliding_window": 16}, None),
        ({**QWEN3, "sliding_window": 16, "use_sliding_window": True}, "the last 16 of 32 tokens"),
    ],
)
def test_a_window_shorter_than_the_sequence_is_not_predicted(tmp_path, settings, why):
    found = unpredicted(of_transformers(tmp_path, **settings))
    assert (found is None) if why is None else (why in found)


@pytest.mark.parametrize(
    ("target", "adapts_mlp"),
    [("q_proj, v_proj", False), ("all-linear", True), ("o_proj, up_proj", True)],
)
def test_frozen_weights_are_whole_and_adapters_where_the_target_is(tmp_path, target, adapts_mlp):
    layout = layout_of(
        of_transformers(tmp_path, "parallel.zero=3", f"model.lora={{r: 4, target: [{target}]}}")
    )
    assert (layout.lora, layout.lora_mlp, layout.shards_frozen) == (4, adapts_mlp, False)


def test_the_utilization_counts_operations_as_the_log_does(tmp_path):
    """Frozen weights have no gradient, so a token of a run with adapters has fewer operations."""
    keys = "model.lora={r: 4, target: [q_proj]}"
    whole, adapted = (of_transformers(tmp_path, *more) for more in ((), (keys,)))
    found = run_time(adapted, H100)
    assert found.model_flops == adapted.model.flops_per_token()
    assert found.model_flops < 0.8 * run_time(whole, H100).model_flops


def test_a_step_that_waits_for_the_host_says_what_checks_that(capsys):
    tiny = str(CONFIGS / "gpt_tiny.yaml")
    assert main(["plan", tiny, "--time", "--device", "h100-sxm"]) == 0
    assert "mostly host time, which one row checks" in " ".join(capsys.readouterr().out.split())
    large = ["model.dim=4096", "model.heads=32", "data.seq_len=4096"]
    assert main(["plan", tiny, *large, "--time", "--device", "h100-sxm"]) == 0
    assert "mostly host time" not in " ".join(capsys.readouterr().out.split())


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
