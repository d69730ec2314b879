"""What ZeRO's offload takes of a step, beside pinned copies and the processor's own step."""

import os

import torch
from torch import nn

from benchmarks.gpu.here import Here
from benchmarks.gpu.rows import Found
from torchdistpackage.ddp.zero.optimizer import ZeroOptimizer

BIG, SMALL = 4096, 64
LAYERS = 8
COPIED_MB, SMALL_MB = 256, 1
ROUNDS = 5


def measure(here: Here, found: Found) -> None:
    here.join()
    with found.case("pinned copies"):
        ceilings = _ceilings(here, found)
    with found.case("the processor's step"):
        step_s = {threads: _processor_s(here, found, threads) for threads in _threads()}
    for stage in (1, 2, 3):
        with found.case(f"ZeRO {stage} with offload"):
            _stage(here, found, stage, ceilings, min(step_s.values()))
    here.leave()


def _threads() -> list[int]:
    return sorted({1, os.cpu_count() or 1})


def _ceilings(here: Here, found: Found) -> dict[str, float]:
    """Bytes a second to the host, to the device, and both ways at once."""
    count = (SMALL_MB if here.small else COPIED_MB) * 2**20
    pinned = not here.small
    host = [torch.empty(count, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    device = [torch.empty(count, dtype=torch.uint8, device=here.device) for _ in range(2)]
    streams = [None if here.small else torch.cuda.Stream() for _ in range(2)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            host[0].copy_(device[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            device[1].copy_(host[1], non_blocking=True)

    copies = {
        "to host": (1, lambda: host[0].copy_(device[0], non_blocking=True)),
        "to device": (1, lambda: device[0].copy_(host[0], non_blocking=True)),
        "both ways": (2, both),
    }
    rates = {}
    for name, (number, copy) in copies.items():
        rates[name] = number * count / here.median_s(copy, ROUNDS)
        text = f"{rates[name] / 1e9:.2f} GB/s"
        found.show(
            f"{'plain' if here.small else 'pinned'} copy, {name}", text, bytes_per_s=rates[name]
        )
    return rates


def _processor_s(here: Here, found: Found, threads: int) -> float:
    """Fused AdamW over as many numbers, in host memory alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    parameters = [nn.Parameter(p.detach().cpu()) for p in _model(here).parameters()]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    took_s = here.median_s(optimizer.step, ROUNDS)
    torch.set_num_threads(before)
    text = f"{1e3 * took_s:.2f} ms"
    found.show(f"AdamW on the processor, {threads} threads", text, step_s=took_s)
    return took_s


def _model(here: Here) -> nn.Sequential:
    width = SMALL if here.small else BIG
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))).to(here.device)


def _stage(
    here: Here, found: Found, stage: int, ceilings: dict[str, float], processor_s: float
) -> None:
    times: dict[bool, float] = {}
    width = SMALL if here.small else BIG
    x = torch.randn(16, width, device=here.device)
    for offload in (False, True):
        net = _model(here)
        inner = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
        optimizer = ZeroOptimizer(inner, net, stage=stage, offload=offload)

        def step(net=net, optimizer=optimizer) -> None:
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        times[offload] = here.median_s(step, ROUNDS)
        optimizer.remove()
    num_bytes = 4 * sum(p.numel() for p in _model(here).parameters())
    copies_s = num_bytes / ceilings["to host"] + num_bytes / ceilings["to device"]
    more_s = times[True] - times[False]
    least_s = max(copies_s / 2, processor_s)
    found.show(
        f"ZeRO {stage} with offload",
        f"{1e3 * times[True]:.1f} ms a step, {1e3 * times[False]:.1f} without; copies one after "
        f"the other {1e3 * copies_s:.1f}, the processor's step {1e3 * processor_s:.1f}; "
        f"{2 * num_bytes / max(more_s, 1e-9) / 1e9:.2f} GB/s, {more_s / least_s:.2f} of the least",
        step_s=times[True],
        without_s=times[False],
        copies_s=copies_s,
        of_the_least=more_s / least_s,
    )
