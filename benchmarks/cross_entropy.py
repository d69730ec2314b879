"""Cross entropy of a 128k vocabulary on 4 ranks: time of forward and backward, memory at its peak.

Peers: torch's `loss_parallel` on DTensors of the same logits on the same ranks; for memory also
`torch.nn.functional.cross_entropy` in one process. Memory is what torch's CPU allocator has handed
out at most since the call began (`torch.profiler`, profile_memory), above the logits that it was
given. The fused rows multiply with the output weight too. Losses and gradients of all
sides are compared before anything is timed.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import arguments, in_turns, local, rows, show, slowest, write
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.parallel.tensor.cross_entropy import (
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)

VOCAB, TOKENS, WIDTH, RANKS = 128 * 1024, 256, 64, 4
CHUNK_TOKENS = 64
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "torch.distributed.tensor.parallel")
OURS, PEER, FUSED = "vocab_parallel_cross_entropy", "torch loss_parallel", "linear_cross_entropy"
UNFUSED = "product, then vocab_parallel_cross_entropy"

Side = Callable[[], tuple[Tensor, Tensor]]
"""Loss and the gradient of what it was computed from, my part."""


def draw() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden values (N, D), weight (V, D), targets (N,), alike on all ranks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(VOCAB, WIDTH, generator=generator) / WIDTH**0.5
    return x, weight, torch.randint(VOCAB, (TOKENS,), generator=generator)


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that is allocated at once during `call`, above what is before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    results = seen.profiler.kineto_results  # type: ignore[union-attr]
    events = [e for e in results.events() if e.name() == "[memory]" and e.device_index() == -1]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def mine(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


def sides() -> dict[str, Side]:
    x, weight, target = draw()
    group, part = dist.group.WORLD, mine(weight)
    assert group is not None
    mesh = init_device_mesh("cpu", (RANKS,))
    logits = (x @ part.t()).requires_grad_()
    sharded = DTensor.from_local(logits.detach(), mesh, [Shard(1)]).requires_grad_()

    def ours() -> tuple[Tensor, Tensor]:
        logits.grad = None
        loss = vocab_parallel_cross_entropy(logits, target, group, vocab=VOCAB, reduction="mean")
        loss.backward()
        assert logits.grad is not None
        return loss.detach(), logits.grad

    def peer() -> tuple[Tensor, Tensor]:
        sharded.grad = None
        with loss_parallel():
            loss = F.cross_entropy(sharded, target)
            loss.backward()
        return loss.full_tensor().detach(), sharded.grad.to_local()

    def product(fused: bool) -> tuple[Tensor, Tensor]:
        own = part.detach().requires_grad_()
        options = {"vocab": VOCAB, "reduction": "mean"}
        if fused:
            loss = linear_cross_entropy(x, own, target, group, chunk_tokens=CHUNK_TOKENS, **options)
        else:
            loss = vocab_parallel_cross_entropy(x @ own.t(), target, group, **options)
        loss.backward()
        assert own.grad is not None
        return loss.detach(), own.grad

    return {
        OURS: ours,
        PEER: peer,
        UNFUSED: partial(product, False),
        FUSED: partial(product, True),
    }


def compare(found: Mapping[str, Side]) -> None:
    """All sides against one process."""
    x, weight, target = draw()
    weight.requires_grad_()
    logits = x @ weight.t()
    logits.retain_grad()
    expected = F.cross_entropy(logits, target)
    expected.backward()
    columns = logits.grad.chunk(RANKS, 1)[dist.get_rank()]  # type: ignore[union-attr]
    for name, side in found.items():
        loss, grad = side()
        torch.testing.assert_close(loss, expected.detach())
        whole = columns if name in (OURS, PEER) else mine(weight.grad)  # type: ignore[arg-type]
        torch.testing.assert_close(grad, whole, rtol=1e-4, atol=1e-8)


def rank_main(rounds: int) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of each turn and bytes at the peak, by side."""
    warnings.filterwarnings("ignore", module="torch.distributed")
    setup_distributed()
    found = sides()
    compare(found)
    times = in_turns(found, rounds, dist.barrier)
    peaks = {name: peak_bytes(side) for name, side in found.items()}
    leave()
    return times, peaks


def alone() -> dict[str, int]:
    """Bytes at the peak of one process: of given logits, and of the product with them."""
    x, weight, target = draw()
    logits = (x @ weight.t()).requires_grad_()
    weight.requires_grad_()
    return {
        OURS: peak_bytes(lambda: F.cross_entropy(logits, target).backward()),
        FUSED: peak_bytes(lambda: F.cross_entropy(x @ weight.t(), target).backward()),
    }


def main() -> None:
    options = arguments(__doc__)
    per_rank = local(rank_main, options.rounds, num_procs=RANKS, preload=PRELOAD)
    table = rows(slowest([times for times, _ in per_rank]))
    show(f"{TOKENS} tokens, {VOCAB} classes, {RANKS} ranks", table, "ms", PEER)

    (whole,) = local(alone, num_procs=1, preload=PRELOAD)
    logits_bytes = TOKENS * VOCAB * 4
    memory = {
        name: {
            "bytes": max(peaks[name] for _, peaks in per_rank),
            "of one process": max(peaks[name] for _, peaks in per_rank) / whole[peer],
        }
        for name, peer in ((OURS, OURS), (PEER, OURS), (UNFUSED, FUSED), (FUSED, FUSED))
    }
    memory |= {f"one process, {name}": {"bytes": bytes_} for name, bytes_ in whole.items()}
    print(f"\nPeak above what was there [MiB], all logits are {logits_bytes >> 20}")
    for name, row in memory.items():
        ratio = f"{row['of one process']:9.3f}" if "of one process" in row else ""
        print(f"{name:48}{row['bytes'] / 2**20:10.1f}{ratio}")
    write(options.json, {"load": os.getloadavg(), "ms": table, "memory": memory})


if __name__ == "__main__":
    main()
