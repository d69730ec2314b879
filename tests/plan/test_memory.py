"""Bytes of a rank under each ZeRO stage: whole, or the part of one of those that share.

No torch.
"""

import pytest

from tests.tells import facts_pattern
from torchdistpackage.config.load import loads
from torchdistpackage.config.schema import PrecisionSection
from torchdistpackage.errors import ConfigError
from torchdistpackage.layout.layout import Layout
from torchdistpackage.plan.memory import MemoryEstimate, memory
from torchdistpackage.plan.run_plan import make_plan, stage_loads
from torchdistpackage.plan.start_bill import start_bill
from torchdistpackage.topology.mesh import topology

LAYOUTS = [Layout("w", (64, 48), (("tensor",), ())), Layout("b", (64,))]
WORLD = topology((("data", 4), ("tensor", 2)), 8)
COUNT = 64 * 48 // 2 + 64


def held(zero: int, *more: str) -> MemoryEstimate:
    one = "parallel: {data: 4}\npipeline: {microbatches: 1}"
    config = loads(one, overrides=[f"parallel.zero={zero}", *more])
    return memory(config, WORLD, LAYOUTS, 5)


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"), [(0, 4, 4, 8), (1, 4, 4, 2), (2, 4, 1, 2)]
)
def test_each_stage_leaves_one_thing_more_in_parts(zero, weights, gradients, optimizer):
    expected = MemoryEstimate(weights * COUNT, gradients * COUNT, optimizer * COUNT)
    assert held(zero) == expected
    assert expected.state_bytes == (weights + gradients + optimizer) * COUNT


def test_stage_3_has_a_quarter_of_everything():
    assert held(3) == MemoryEstimate(COUNT, COUNT, 2 * COUNT)


def test_a_group_of_two_data_ranks_has_a_half():
    assert held(3, "parallel.zero_group=2") == MemoryEstimate(2 * COUNT, 2 * COUNT, 4 * COUNT)
    assert held(3, "parallel.zero_group=4") == held(3)
    assert held(2, "parallel.zero_group=2").weights_bytes == 4 * COUNT


def test_gradients_of_several_microbatches_are_whole_beside_their_part():
    assert held(2, "pipeline.microbatches=4").gradients_bytes == 5 * COUNT
    assert held(1, "pipeline.microbatches=4") == held(1)


def test_narrow_weights_have_a_wide_copy_in_parts_and_one_wide_bucket():
    narrow = ["precision.dtype=bf16", "precision.weights=bf16"]
    assert held(1, *narrow) == MemoryEstimate(2 * COUNT, 4 * COUNT, 3 * COUNT)
    assert held(3, *narrow) == MemoryEstimate(0, COUNT, 3 * COUNT)
    assert held(1, "precision.dtype=bf16") == held(1)


def test_copies_of_gradients_that_travel_narrow_count_until_all_have_arrived():
    """Without ZeRO; under it sums arrive in pieces, which count in no type."""
    narrow = "precision.reduce_dtype=bf16"
    assert held(0, narrow).gradients_bytes == (4 + 2) * COUNT
    assert held(0, narrow, "precision.dtype=bf16").gradients_bytes == (4 + 2) * COUNT
    assert held(1, narrow) == held(1)


def test_narrow_types_are_asked_for():
    assert PrecisionSection().weights == "float32"


GPUS = ["launch.slurm.nodes=2", "launch.slurm.gpus-per-node=4", "launch.slurm.ntasks-per-node=4"]


def plan_of(*more: str):
    return make_plan(loads("parallel: {tensor: 2}", overrides=["data.global_batch=64", *more]), 8)


def test_a_job_on_gpus_holds_communicators_too():
    alone, on_gpus = plan_of(), plan_of(*GPUS)
    (before,), (after,) = (stage_loads(plan) for plan in (alone, on_gpus))
    assert before.memory.communicators_bytes == 0
    assert before.memory.total_bytes == before.memory.state_bytes
    bill = start_bill(on_gpus)
    assert bill.communicators == 3, "all ranks, and those along data and tensor"
    assert after.memory.communicators_bytes == bill.device_bytes > 0
    assert after.memory.state_bytes == before.memory.state_bytes
    assert after.memory.total_bytes == before.memory.state_bytes + bill.device_bytes
    assert not plan_of("launch.slurm.gres=nvme:1", *GPUS[::2]).has_gpus
    assert plan_of("launch.slurm.gres=gpu:4", *GPUS[::2]).has_gpus


@pytest.mark.parametrize(
    ("keys", "peers"),
    [
        ("context=4,cp_comm_type=p2p", 6),
        ("context=4,cp_comm_type=all_gather", 0),
        ("data=4,expert=4", 6),
    ],
)
def test_peers_of_messages_follow_what_a_layout_sends(keys: str, peers: int):
    words = [f"parallel.{word}" for word in keys.split(",")]
    experts = ["model.moe.num_experts=8"] if "expert" in keys else []
    plan = plan_of("parallel.tensor=2", *words, *experts)
    assert start_bill(plan).peers == peers


def test_a_limit_that_communicators_exceed_is_refused():
    within = ["train.recompute=auto", "train.memory_gb=1"]
    plan_of(*within)
    with pytest.raises(ConfigError, match=facts_pattern("1.89 GB", "NCCL")):
        plan_of(*within, *GPUS)
