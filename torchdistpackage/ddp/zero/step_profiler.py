"""What a step of a module and a group take: measured, to choose by (cost_model.py).

One rule: a trial leaves nothing behind. Gradients, buffers and the state of torch's random numbers
are afterwards what they were, so training begins as if there had been none.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from torchdistpackage.comm import primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.ddp.bucket_plan import bucket_sizes
from torchdistpackage.ddp.zero.cost_model import StepCost

NUM_TRIALS, NUM_BUCKETS = 3, 4
"""Of which the shortest counts: other work on the machine only makes one longer."""

PASSES_OF_ADAM = 3.5
"""It reads four numbers for each parameter and writes three."""


def measure(
    module: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    group: Group,
    wire: torch.dtype | None = None,
) -> tuple[StepCost, float]:
    """A step of this rank, and bytes a second of an all-reduce over the group; all ranks call it.

    loss_of: computes the loss of one batch. wire: dtype in which gradients travel, if another.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    device = trained[0].device
    with _untouched(module, trained):
        times = [_times_s(module, loss_of, trained, device) for _ in range(1 + NUM_TRIALS)]
    forward_s, backward_s, pass_s = map(min, zip(*times[1:], strict=True))
    default_bytes = bucket_sizes(queued=primitives.is_queued(group)).default_bytes
    bytes_per_s, busy_s = _wire(group, device, default_bytes)
    # gradients are summed in fp32 at least
    sizes = [p.numel() * (wire.itemsize if wire else max(4, p.itemsize)) for p in trained]
    work = StepCost(
        forward_s,
        backward_s,
        PASSES_OF_ADAM * pass_s,
        num_bytes=sum(sizes),
        bucket_bytes=max(default_bytes, *sizes),
        exchange_s=busy_s * sum(sizes),
    )
    return work, bytes_per_s


def _times_s(
    module: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    trained: Sequence[nn.Parameter],
    device: torch.device,
) -> tuple[float, float, float]:
    """Seconds of a forward, a backward, and reading and writing each gradient once."""
    for p in trained:
        p.grad = None
    at_s = [_now_s(device)]
    loss = loss_of(module)
    at_s.append(_now_s(device))
    loss.backward()
    at_s.append(_now_s(device))
    dense = [p.grad for p in trained if p.grad is not None and not p.grad.is_sparse]
    if dense:  # as optimizers do it: many small ones take a call or two
        torch._foreach_mul_(dense, 1)
    at_s.append(_now_s(device))
    return at_s[1] - at_s[0], at_s[2] - at_s[1], at_s[3] - at_s[2]


def _wire(group: Group, device: torch.device, bucket_bytes: int) -> tuple[float, float]:
    """Bytes a second, and seconds a byte that this rank's processor is busy with it."""
    buckets = [torch.zeros(bucket_bytes // 4, device=device) for _ in range(NUM_BUCKETS)]
    num_bytes = sum(bucket.nbytes for bucket in buckets)
    times, busy = [], []
    for _ in range(1 + NUM_TRIALS):
        primitives.all_reduce(buckets[0][:1], group)  # all ranks are there
        begin_s, begin_busy_s = _now_s(device), time.process_time()
        for pending in [primitives.start_all_reduce(bucket, group) for bucket in buckets]:
            pending.wait()
        times.append(_now_s(device) - begin_s)
        busy.append(time.process_time() - begin_busy_s)
    # a device's own engines do it, and its host only waits
    busy_s = 0.0 if device.type != "cpu" else min(busy[1:]) / num_bytes
    return num_bytes / min(times[1:]), busy_s


@contextmanager
def _untouched(module: nn.Module, trained: Sequence[nn.Parameter]) -> Iterator[None]:
    gradients = [p.grad for p in trained]
    buffers = [
        (owner, name, buffer, None if buffer is None else buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
    ]
    cuda = {p.device.index for p in trained if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(cuda)), torch.enable_grad():
            yield
    finally:
        for p, grad in zip(trained, gradients, strict=True):
            p.grad = grad
        with torch.no_grad():
            for owner, name, buffer, values in buffers:
                if buffer is not None:
                    buffer.copy_(values)
                owner._buffers[name] = buffer


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
