"""A large run shrunk for the order linter keeps its axes, its schedule and its rules."""

from pathlib import Path

import pytest

from tests.train import parity
from torchdistpackage.config.load import load
from torchdistpackage.plan.run_plan import Plan, make_plan
from torchdistpackage.plan.shrink import MOST_RANKS, is_small, shrunk
from torchdistpackage.schedule.generators import build
from torchdistpackage.schedule.resolve import to_csv

CONFIGS = Path(__file__).parents[2] / "configs"
AXES = ("data", "pipe", "tensor")


def large(*more: str, data: int = 16, pipe: int = 8, tensor: int = 8) -> Plan:
    given = {
        "parallel.data": data, "parallel.pipe": pipe, "parallel.tensor": tensor,
        "model.layers": 32, "model.heads": 32, "model.dim": 4096, "model.vocab": 50257,
        "data.seq_len": 4096, "data.global_batch": 32 * data, "pipeline.microbatches": 16,
        "train.accumulate": 2,
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in given.items()]
    return make_plan(parity.config([*words, *more]), data * pipe * tensor)


def degrees(plan: Plan) -> dict[str, int]:
    return {axis: plan.topology.dense.axis_size(axis) for axis in AXES}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((16, 8, 8), (2, 4, 2)),
        ((512, 1, 4), (8, 1, 2)),
        ((1, 64, 1), (1, 16, 1)),
        ((3, 3, 9), (2, 2, 3)),
        ((2, 2, 4), (2, 2, 4)),
    ],
)
def test_every_axis_keeps_several_ranks(given, expected):
    heads = ("model.heads=72", "model.dim=288", "data.seq_len=72")
    plan = large(*heads, **dict(zip(AXES, given, strict=True)))
    small = shrunk(plan)
    assert degrees(small) == dict(zip(AXES, expected, strict=True))
    assert small.world_size <= MOST_RANKS
    assert small.schedule.name == plan.schedule.name


@pytest.mark.parametrize(("kv_heads", "expected"), [(8, (4, 2)), (4, (4, 2)), (1, (2, 1))])
def test_key_value_heads_stay_shared(kv_heads, expected):
    """By queries and, where they were, by ranks: the calls are those of the large model."""
    options = ("model.head_dim=64", "model.mlp=swiglu", "model.mlp_hidden=11008")
    small = shrunk(large(f"model.kv_heads={kv_heads}", *options))
    assert (small.shape.heads, small.shape.num_kv_heads) == expected
    assert degrees(small)["tensor"] == 2 and is_small(small)


def test_a_large_model_of_ours_becomes_a_small_one():
    plan = large("parallel.sequence_parallel=true", "model.mlp_ratio=2.6875", "train.accumulate=32",
                 "pipeline.microbatches=1")  # fmt: skip
    small = shrunk(plan)
    assert not is_small(plan) and is_small(small)
    assert small.config.train.accumulate == 2 and small.samples_per_microbatch == 1
    assert small.shape.tied == plan.shape.tied and small.shape.layers == 16


def test_a_small_run_has_one_sample_in_a_microbatch_and_is_otherwise_as_it_was():
    plan = make_plan(load(str(CONFIGS / "gpt_tiny.yaml"), []), 4)
    small = shrunk(plan)
    assert (plan.samples_per_microbatch, small.samples_per_microbatch) == (4, 1)
    assert small.shape == plan.shape and small.topology == plan.topology


def test_a_custom_schedule_keeps_its_ranks_and_microbatches(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(to_csv(build("gpipe", 8, 16)))
    small = shrunk(large("pipeline.schedule=custom", f"pipeline.file={path}"))
    assert degrees(small) == {"data": 2, "pipe": 8, "tensor": 2}
    assert small.config.pipeline.microbatches == 16


@pytest.mark.full
@pytest.mark.parametrize(
    "schedule", ["interleaved", "zb-v", pytest.param("auto", marks=pytest.mark.full)]
)
def test_other_schedules_are_shrunk(schedule):
    small = shrunk(large(f"pipeline.schedule={schedule}", "pipeline.chunks=null"))
    assert degrees(small)["pipe"] == 4 and small.config.pipeline.microbatches == 16
