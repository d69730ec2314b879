"""What a step's communication takes: bytes of the plan, seconds of a profile that is known.

No torch.
"""

import re

import pytest

from tests.harness.bench.reports import LATENCY_S, PER_BYTE_S, both_links, report, row
from torchdistpackage.config.load import loads
from torchdistpackage.plan.estimate import estimates, timeline_with_messages
from torchdistpackage.plan.run_plan import make_plan, num_parameters

RUN = """
model: {layers: 4, dim: 64, heads: 4, vocab: 256, tied: false}
data: {seq_len: 32, global_batch: 64}
pipeline: {microbatches: 4}
"""
PROFILE = report(*both_links("data", (0, 1), "all_reduce", "p2p")).profile()
PADDING = 1e-3
"""Relative: of buckets, whose members begin on a cache line and have a flag each."""


def planned(world_size: int, *degrees: str):
    config = loads(
        RUN, overrides=[f"parallel.{degree}" for degree in degrees], world_size=world_size
    )
    return make_plan(config, world_size)


def by_axis(plan, ranks_per_node=None):
    return {x.axis: x for x in estimates(plan, PROFILE, ranks_per_node)}


def test_gradients_are_summed_once_a_step_in_buckets():
    plan = planned(4, "data=4")
    num_bytes = 4 * num_parameters(plan)
    (found,) = estimates(plan, PROFILE, None)
    assert found.axis == "data" and found.what.startswith("1 x all_reduce of")
    assert found.time_s == pytest.approx(LATENCY_S + 1.5 * num_bytes * PER_BYTE_S, rel=PADDING)
    wide = make_plan(loads(RUN, overrides=["model.dim=1024", "parallel.data=4"], world_size=4), 4)
    (found,) = estimates(wide, PROFILE, None)
    number = sum(map(int, re.findall(r"(\d+) x all_reduce", found.what)))
    seconds = number * LATENCY_S + 1.5 * 4 * num_parameters(wide) * PER_BYTE_S
    assert number > 1 and found.time_s == pytest.approx(seconds, rel=PADDING)


def test_zero_sums_in_parts_and_brings_parameters_back():
    """Together what one sum of whole gradients takes, and a latency more."""
    rows = (*both_links("data", (0, 1), "all_reduce", "reduce_scatter", "all_gather"),)
    profile = report(*rows).profile()
    for stage, num_sums in ((1, 1), (2, 2), (3, 2)):
        plan = planned(4, "data=4", f"zero={stage}")
        section = plan.config.train.model_copy(update={"accumulate": 2})
        twice = make_plan(plan.config.model_copy(update={"train": section}), 4)
        (found,) = estimates(twice, profile, None)
        num_gathers = 2 if stage == 3 else 1
        once_s = LATENCY_S + 0.75 * 4 * num_parameters(plan) * PER_BYTE_S
        flags_s = num_sums * LATENCY_S  # which parameters were used: one small sum with each
        expected = (num_sums + num_gathers) * once_s + flags_s
        assert found.time_s == pytest.approx(expected, rel=PADDING)
        assert "reduce_scatter" in found.what and "all_gather" in found.what
    without = report(*both_links("data", (0, 1), "all_reduce", "reduce_scatter")).profile()
    (found,) = estimates(planned(4, "data=4", "zero=1"), without, None)
    assert found.time_s is None and "no all_gather" in found.what


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bf16", 4), ("float64", 8)])
def test_each_microbatch_crosses_a_boundary_forth_and_back(dtype, width):
    """Under autocast as float32, as what goes from block to block is added up."""
    config = loads(RUN, overrides=["parallel.pipe=4", f"precision.dtype={dtype}"], world_size=4)
    (found,) = estimates(make_plan(config, 4), PROFILE, None)
    num_bytes = 16 * 32 * 64 * width  # 64 samples in 4 microbatches
    assert found.time_s == pytest.approx(8 * (LATENCY_S + num_bytes * PER_BYTE_S))


def test_a_block_sums_four_times_and_embedding_and_head_once():
    (found,) = estimates(planned(2, "tensor=2"), PROFILE, None)
    num_bytes = 16 * 32 * 64 * 4
    number = 4 * (4 * 4 + 2)
    losses_s = 4 * (2 * LATENCY_S + 3 * 16 * 32 * 4 * PER_BYTE_S)  # three numbers of each token
    layers_s = number * (LATENCY_S + num_bytes * PER_BYTE_S)
    assert found.time_s == pytest.approx(layers_s + losses_s)


def test_an_axis_that_crosses_nodes_takes_what_that_link_takes():
    plan = planned(8, "data=2", "pipe=2", "tensor=2")
    near, far = by_axis(plan), by_axis(plan, 4)
    assert far["data"].time_s == pytest.approx(10 * near["data"].time_s)
    assert far["pipe"].time_s == near["pipe"].time_s
    assert "between nodes" in far["data"].what and "inside a node" in far["pipe"].what


def test_what_nobody_knows_is_not_estimated():
    sequence = by_axis(planned(2, "tensor=2", "sequence_parallel=true"))["tensor"]
    assert sequence.time_s is None and "has no reduce_scatter inside a node" in sequence.what
    only_near = report(*both_links("data", (0, 1), "p2p")[:3]).profile()
    (found,) = estimates(planned(4, "data=4"), only_near, 2)
    assert (found.time_s, found.what) == (None, "the profile has no all_reduce between nodes")
    own = loads("model: {target: 'my.net:build'}\nparallel: {data: 2}", world_size=2)
    (found,) = estimates(make_plan(own, 2), PROFILE, None)
    assert found.time_s is None and "once it is built" in found.what
    assert estimates(planned(1), PROFILE, None) == ()


def test_beyond_the_sizes_that_were_measured_it_says_so():
    short = report(*both_links("data", (0, 1), "all_reduce")).profile()
    (near,) = estimates(planned(2, "data=2"), short, None)
    wide = make_plan(loads(RUN, overrides=["model.dim=1024", "parallel.data=4"], world_size=4), 4)
    (far,) = estimates(wide, short, None)
    assert "extrapolated" not in near.what and far.time_s is not None
    assert far.what.endswith(" MiB on the bus, measured up to 1 MiB)")


def test_beyond_sizes_that_made_no_difference_nothing_is_estimated():
    flat = report(*(row("p2p", n, ranks=(0, 1), p50_s=1e-5) for n in (512, 1024))).profile()
    plan = planned(4, "pipe=4")
    (found,) = estimates(plan, flat, None)
    assert found.time_s is None and "profile ends at 1 KiB, up to which" in found.what
    assert timeline_with_messages(plan, flat, None, 1.0) is None


def test_bf16_sums_gradients_in_float32():
    rows = [
        row(operation, size, dtype=dtype, ranks=(0, 1), p50_s=latency_s + size * 1e-9)
        for operation in ("all_reduce", "p2p")
        for dtype, latency_s in [("int8", 9.0), ("bf16", 2.0), ("float32", 4.0)]
        for size in (2**10, 2**20)
    ]
    words = ["parallel.pipe=2", "parallel.data=2", "precision.dtype=bf16"]
    plan = make_plan(loads(RUN, overrides=words, world_size=4), 4)
    found = {x.axis: x.time_s for x in estimates(plan, report(*rows).profile(), None)}
    assert found["data"] == pytest.approx(4.0, abs=0.1)
    assert found["pipe"] == pytest.approx(8 * 4.0, abs=0.1)


def test_messages_lengthen_the_bubble():
    plan = planned(4, "pipe=4")
    long = timeline_with_messages(plan, PROFILE, None, 1.0)
    short = timeline_with_messages(plan, PROFILE, None, 1e-3)
    assert long.bubble == pytest.approx(plan.timeline.bubble, abs=1e-2)
    assert short.bubble > plan.timeline.bubble + 0.02
    assert timeline_with_messages(planned(2, "data=2"), PROFILE, None, 1.0) is None
