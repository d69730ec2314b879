"""What a queued transport changes: nothing is posted ahead, so nothing is held for it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from tests.ddp.allocated import Meter
from tests.ddp.zero.test_room import LAYERS, WIDTH, build, room
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer


def most_gradients(stage: int) -> int:
    return room({"stage": stage})[2]


@pytest.mark.parametrize("stage", [2, 3])
def test_no_bucket_has_memory_before_its_gradients_come(pool, stage):
    bucket = (WIDTH + 1) * WIDTH * 8 * 1.06
    for most in pool(2).run(most_gradients, stage, transport="late"):
        assert most <= 3 * bucket, "the one that leaves, and two on their way before it"


def made_before_the_first_step() -> int:
    """Bytes that `step` made by the time that the optimizer is first called."""
    meter, found = Meter(), list[int]()
    net = build().float()
    inner = optim.SGD(net.parameters(), lr=0.1)
    zero = ZeroOptimizer(inner, net, bucket_cap_mb=0.02, wire_dtype=torch.bfloat16)
    plain_step = inner.step
    inner.step = lambda: (found.append(meter.now), plain_step())
    meter.run(nn.Module.__call__, net, torch.ones(2, net[0].in_features)).sum().backward()
    zero.reducer.finish()
    before = meter.now
    meter.run(zero.step)
    zero.finish()
    assert len(zero._buckets) >= LAYERS and dist.get_world_size() == 2
    return found[0] - before


def test_memory_for_the_wire_is_made_when_a_gather_begins(pool):
    assert pool(2).run(made_before_the_first_step, transport="late") == [0, 0]
