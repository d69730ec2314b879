"""What data parallelism may hold besides the model: bytes, counted by the allocator."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ddp.allocated import Meter
from torchdistpackage.ddp.bucket_comm import STAGED_BYTES
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer

DIM, LAYERS = 128, 12
LARGEST = 4 * 4 * DIM * DIM
"""Bytes of the largest gradient, which is the last one, when activations are gone."""
KEPT = 64
"""Bytes of single numbers."""
ROUNDED_UP = 1.02


def model_of(dtype: torch.dtype) -> nn.Module:
    layers = [nn.Linear(DIM, DIM) for _ in range(LAYERS)]
    return nn.Sequential(nn.Linear(4 * DIM, DIM), *layers).to(dtype)


def num_elements(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def besides_elements(model: nn.Module) -> int:
    """Of a bucket: a mark for each parameter, and what aligns members to 64 bytes."""
    return sum(1 + -p.numel() % 16 for p in model.parameters())


def backward(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(1, 4 * DIM, dtype=dtype)).sum().backward()


def train(meter: Meter, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Three steps on the meter; the most that one held."""
    peaks = []
    for _ in range(3):
        meter.run(backward, model)
        peaks.append(meter.peak)
        meter.run(optimizer.step)
        peaks.append(meter.peak)
        meter.run(optimizer.zero_grad)
    return max(peaks)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)


def naive_ddp_of_fp32(cap_mb: float | None) -> None:
    """Beside a plain training no copies of gradients but those that are moved to their bucket now:
    one, and small ones up to 64 KiB."""
    plain = Meter()
    model = plain.run(model_of, torch.float32)
    expected = train(plain, model, sgd(model))

    # a thread of gloo may let go of a bucket a moment late, which only adds
    found = min(held_by_naive_ddp(cap_mb) for _ in range(3))
    model = model_of(torch.float32)
    assert found - expected <= LARGEST + STAGED_BYTES + 4 * besides_elements(model) + KEPT


def held_by_naive_ddp(cap_mb: float | None, reduce_dtype: torch.dtype | None = None) -> int:
    meter = Meter()
    model = meter.run(model_of, torch.float32)
    ddp = meter.run(NaiveDDP, model, bucket_cap_mb=cap_mb, reduce_dtype=reduce_dtype)
    return train(meter, ddp, sgd(ddp))


@pytest.mark.few(1)
@pytest.mark.own_transport("measures memory, of which the late transport holds copies")
@pytest.mark.parametrize("cap_mb", [None, 0.05, 25])
def test_fp32_gradients_are_held_once(ranks, cap_mb):
    ranks(2).run(naive_ddp_of_fp32, cap_mb)


def narrow_copies() -> None:
    """What a plan counts: 2 bytes a parameter more, while all are on their way."""
    kept = min(held_by_naive_ddp(0.05) for _ in range(3))
    found = min(held_by_naive_ddp(0.05, torch.bfloat16) for _ in range(3)) - kept
    model = model_of(torch.float32)
    copies = 2 * (num_elements(model) + besides_elements(model))
    assert copies - LARGEST <= found <= copies + KEPT, (found, copies)


@pytest.mark.full
@pytest.mark.own_transport("measures memory, of which the late transport holds copies")
def test_gradients_that_travel_narrow_have_copies(ranks):
    ranks(2).run(narrow_copies)


def naive_ddp_of_bf16() -> None:
    """Microbatches add up in exactly one fp32 bucket: 4 bytes a parameter, none in bf16."""
    meter = Meter()
    model = meter.run(model_of, torch.bfloat16)
    before = meter.now
    ddp = meter.run(NaiveDDP, model, fp32_grads=True)
    for _ in range(5):
        meter.run(backward, ddp)
        bucket = meter.now - before
        most = 4 * besides_elements(model) + KEPT
        assert 0 <= bucket - 4 * num_elements(model) <= most
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_bf16_gradients_are_one_fp32_bucket(ranks):
    ranks(2).run(naive_ddp_of_bf16)


def narrowed() -> None:
    """What a plain optimizer takes is in bf16, and the bucket's memory is away meanwhile."""
    meter = Meter()
    model = meter.run(model_of, torch.bfloat16)
    before = meter.now
    ddp = meter.run(NaiveDDP, model)
    for _ in range(3):
        meter.run(backward, ddp)
        assert 0 <= meter.now - before - 2 * num_elements(model) <= KEPT


def test_gradients_for_a_plain_optimizer_replace_the_bucket(ranks):
    ranks(2).run(narrowed)


def zero_states(stage: int, dtype: torch.dtype) -> None:
    """AdamW's two moments, and fp32 masters of bf16 parameters, are held once over all ranks."""
    meter = Meter()
    model = meter.run(model_of, dtype)
    adamw = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer = meter.run(ZeroOptimizer, adamw, model, stage=stage, bucket_cap_mb=0.2)
    meter.run(backward, model)
    meter.run(optimizer.step)
    states = [x for state in optimizer.state.values() for x in state.values()]
    share = 4 * num_elements(model) / dist.get_world_size()
    assert sum(x.nbytes for x in states) <= 2 * share * ROUNDED_UP

    meter.run(optimizer.zero_grad)
    meter.run(optimizer.finish)
    parameters = dtype.itemsize * num_elements(model)
    gradients = 4 * num_elements(model) if stage == 1 else share
    masters = share if dtype is torch.bfloat16 or stage == 3 else 0
    assert meter.now <= parameters + (gradients + masters + 2 * share) * ROUNDED_UP


@pytest.mark.parametrize(
    ("size", "stage", "dtype"),
    [
        (2, 1, torch.float32),
        (2, 3, torch.bfloat16),
        pytest.param(3, 2, torch.float32, marks=pytest.mark.full),
        pytest.param(4, 1, torch.bfloat16, marks=pytest.mark.full),
        pytest.param(4, 2, torch.bfloat16, marks=pytest.mark.full),
    ],
)
def test_zero_states_are_one_nth_and_at_most_two_percent_more(ranks, size, stage, dtype):
    ranks(size).run(zero_states, stage, dtype)


def even_layers() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (4, DIM)), *(nn.Linear(DIM, DIM) for _ in range(24)))


def zero_at_its_worst(stage: int) -> None:
    """Whole are parameters, which the forward reads, and in stage 1 gradients; all else is 1/n, or
    of the few buckets that are under way."""
    meter, size = Meter(), dist.get_world_size()
    model = meter.run(even_layers)
    adamw = torch.optim.AdamW(model.parameters(), foreach=False)
    optimizer = meter.run(ZeroOptimizer, adamw, model, stage=stage, bucket_cap_mb=0.07)
    whole, bucket = 4 * num_elements(model), 4 * (DIM + 1) * DIM
    kept = (
        whole + 2 * whole / size + bucket
    )  # parameters, state, a gradient that has just been made
    if stage == 1:
        kept += whole + whole * (size - 1) / size  # gradients, and what is to be added to mine
    else:
        kept += whole / size * (stage - 1)  # sums; in stage 3 what is stepped too
        kept += 5 * bucket + 3 * bucket * (size - 1) / size  # here or expected; on their way to me
    worst = [train(meter, model, optimizer) for _ in range(2)]
    assert worst[stage > 1] <= kept * ROUNDED_UP, "in stages 2 and 3 not in the first step"


@pytest.mark.few(1)
@pytest.mark.own_transport("measures memory, of which the late transport holds copies")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_zero_at_its_worst_holds_what_the_stage_says(ranks, size, stage):
    ranks(size).run(zero_at_its_worst, stage)
