"""Optimizer state in host memory: the same numbers, and where the bytes are."""

import pytest
import torch
from torch import nn, optim

from tests.ddp.allocated import Meter
from tests.tells import facts_pattern
from torchdistpackage.comm.creation import world
from torchdistpackage.ddp.zero.offload import Offload, check_offload
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer
from torchdistpackage.errors import LayoutError

STEPS, WIDTH = 4, 9


def build(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH)).to(dtype)


def trained(dtype: torch.dtype, offload: bool, stage: int) -> tuple[nn.Module, ZeroOptimizer]:
    net = build(dtype)
    inner = optim.AdamW(net.parameters(), fused=True)
    optimizer = ZeroOptimizer(inner, net, stage=stage, offload=offload, bucket_cap_mb=1e-4)
    for step in range(STEPS):
        for part in range(2):  # of which each sums, from stage 2 on
            torch.manual_seed(10 * step + part + 1000 * world().rank())
            net(torch.randn(3, WIDTH, dtype=dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finish()
    return net, optimizer


def same_numbers(dtype: torch.dtype, stage: int) -> None:
    (net, optimizer), (twin, reference) = (trained(dtype, on, stage) for on in (True, False))
    torch.testing.assert_close(net.state_dict(), twin.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), reference.state_dict(), rtol=0, atol=0)
    mine = {shard.tensor.untyped_storage().data_ptr() for shard in optimizer.shards}
    parameters = {p.untyped_storage().data_ptr() for p in net.parameters()}
    assert not mine & parameters, "nothing that the optimizer steps is memory of a parameter"


@pytest.mark.few(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_offloaded_state_steps_to_the_same_bit(ranks, dtype: torch.dtype, stage: int):
    ranks(2).run(same_numbers, dtype, stage)


def where_the_bytes_are(dtype: torch.dtype, stage: int) -> None:
    """Beside what the optimizer steps there are the parameters, and in stage 1 their gradients."""
    net = nn.Sequential(*(nn.Linear(64, 64, dtype=dtype) for _ in range(8)))
    num_elements = sum(p.numel() for p in net.parameters())
    meter = Meter()

    def train() -> ZeroOptimizer:
        inner = optim.AdamW(net.parameters(), fused=True)
        optimizer = ZeroOptimizer(inner, net, stage=stage, offload=True, bucket_cap_mb=0.05)
        for _ in range(2):
            net(torch.ones(2, 64, dtype=dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        return optimizer

    optimizer = meter.run(train)
    kept = [s.tensor for s in optimizer.shards]
    kept += [bucket.bucket_comm.total for bucket in optimizer._buckets]
    kept += [x for state in optimizer.state.values() for x in state.values()]
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
    host, device = sum(held.values()), meter.now - sum(held.values())
    assert host / num_elements == pytest.approx(16 / world().size(), rel=0.02)
    on_device = dtype.itemsize + (4 if stage == 1 else 0)
    assert device / num_elements == pytest.approx(on_device, rel=0.02)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_parameters_or_gradients_is_in_host_memory(ranks, dtype, stage: int):
    ranks(2).run(where_the_bytes_are, dtype, stage)


def test_copies_cast_both_ways_and_bytes_are_counted():
    offload = Offload(torch.device("cpu"))
    device = torch.tensor([1.0, 1 + 2**-7, 3.0], dtype=torch.bfloat16)
    host = offload.allocate(device, torch.float32)
    assert (host.shape, host.dtype, offload.bytes) == (device.shape, torch.float32, 12)
    offload.offload(host, device)
    offload.wait()
    assert host.tolist() == [1.0, 1 + 2**-7, 3.0]
    host += 2**-12
    offload.to_device(host, device)
    assert device.tolist() == [1.0, 1 + 2**-7, 3.0], "rounded to what bf16 has"
    host += 1
    assert device.tolist() == [1.0, 1 + 2**-7, 3.0], "memory of its own"


def test_a_step_in_a_cuda_graph_is_refused():
    net = nn.Linear(2, 2)
    inner = optim.SGD(net.parameters(), lr=1.0)
    check_offload(inner)
    inner.param_groups[0]["capturable"] = True
    with pytest.raises(LayoutError, match=facts_pattern("group 0", "SGD")):
        check_offload(inner)
