"""Attention over two ranks beside one process and a ring by hand, causal, forward and backward.

    python -m benchmarks.context             every length, free and at 1 Gbit/s, about 2 minutes
    python -m benchmarks.context --rounds 3  quick

As root: each rank is on a host of its own, joined by a cable, and keeps to a core. Sides take turns
in one run; numbers are medians, and ratios are of the medians.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.data_parallel.link import RATES, Link, enter_alone, shape
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.launch.workers import run_local
from torchdistpackage.parallel import context_attention, shard_sequence

BATCH, HEADS, WIDTH = 1, 8, 64
LENGTHS = (1024, 4096)
SIDES = ("one process", "ring by hand", "p2p", "all_gather", "a2a")
BARS = {(4096, "p2p"): 0.66, (1024, "p2p"): 0.90}
"""Of one process's own time, over the free cable."""

_aten = torch.ops.aten
_forward = _aten._scaled_dot_product_flash_attention_for_cpu
_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rates", type=lambda text: text.split(","), default=["free", "1g"])
    options = parser.parse_args(argv)
    with Link() as link:
        results = {}
        for rate in options.rates:
            args = (link.hosts, rate, options.rounds)
            env = {**link.env, "OMP_NUM_THREADS": "1"}
            preload = ("torch", "benchmarks.context")
            results[rate] = run_local(rank_main, args, num_procs=2, preload=preload, env=env)[0]
    print(json.dumps(results))
    print("\n| S | link | " + " | ".join(SIDES) + " | p2p / one | p2p / by hand |")
    print("|---" * (len(SIDES) + 4) + "|")
    for rate, found in results.items():
        for length, sides in found.items():
            times = [f"{sides[name] * 1e3:.0f}" for name in SIDES]
            ratios = [sides["p2p"] / sides[name] for name in SIDES[:2]]
            print(
                f"| {length} | {rate} | " + " | ".join(times + [f"{r:.3f}" for r in ratios]) + " |"
            )
    if {"free", "1g"} <= results.keys():
        free, slow = (results[rate][LENGTHS[-1]]["p2p"] for rate in ("free", "1g"))
        print(f"\nexposed at 1 Gbit/s, S {LENGTHS[-1]}: {(slow - free) / slow:.1%} of the step")
    return 0


def rank_main(hosts: Sequence[str], rate: str, rounds: int) -> dict[int, dict[str, float]]:
    """Median seconds of a forward and its backward, by length and side."""
    enter_alone(hosts, int(os.environ["RANK"]))
    rank = setup_distributed()[0]
    if rank == 0:
        shape(hosts, RATES[rate])
    dist.barrier()
    found = {length: measured(rank, length, rounds) for length in LENGTHS}
    leave()
    return found


def measured(rank: int, length: int, rounds: int) -> dict[str, float]:
    torch.manual_seed(1)
    whole = [torch.randn(BATCH, HEADS, length, WIDTH) for _ in range(4)]
    parts = [shard_sequence(x, 2, group=dist.group.WORLD) for x in whole]
    sides: dict[str, Callable[[], list[Tensor] | None]] = {
        "one process": lambda: one_process(whole) if rank == 0 else None,
        "ring by hand": lambda: by_hand(rank, *parts),
    }
    for name in ("p2p", "all_gather", "a2a"):
        sides[name] = lambda name=name: ours(name, parts)
    expected = [shard_sequence(x, 2, group=dist.group.WORLD) for x in one_process(whole)]
    for name in SIDES[1:]:
        for got, want in zip(sides[name](), expected, strict=True):
            assert (got - want).abs().max() < 1e-4 * want.abs().max(), name
    taken: dict[str, list[float]] = {name: [] for name in SIDES}
    for _ in range(rounds):
        for name, side in sides.items():
            dist.barrier()
            begin = time.perf_counter()
            side()
            dist.barrier()
            taken[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def one_process(whole: Sequence[Tensor]) -> list[Tensor]:
    *inputs, grad = whole
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def ours(comm_type: str, parts: Sequence[Tensor]) -> list[Tensor]:
    *inputs, grad = parts
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = context_attention(*inputs, is_causal=True, comm_type=comm_type, group=dist.group.WORLD)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def by_hand(rank: int, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """The shortest ring of two: keys and values of the peer stay for the backward."""
    half = q.shape[2] // 2
    theirs, works = _exchanged(rank, torch.stack([k, v]))
    out, lse = _forward(q, k, v, 0.0, True)
    for work in works:
        work.wait()
    # rank 0 has chunks 0 and 3, of which 3 sees 1 and 2; rank 1 sees 0 alone
    rows = slice(half, None) if rank == 0 else slice(None)
    columns = slice(None) if rank == 0 else slice(0, half)
    part_q, part_k, part_v = q[:, :, rows], theirs[0][:, :, columns], theirs[1][:, :, columns]
    more, more_lse = _forward(part_q, part_k, part_v, 0.0, False)
    both = torch.logaddexp(lse[:, :, rows], more_lse)
    old = out[:, :, rows] * (lse[:, :, rows] - both).exp()[..., None]
    out[:, :, rows] = old + more * (more_lse - both).exp()[..., None]
    lse[:, :, rows] = both
    dq, dk, dv = _backward(grad, q, k, v, out, lse, 0.0, True)
    more_q, more_k, more_v = _backward(
        grad[:, :, rows], part_q, part_k, part_v, out[:, :, rows], lse[:, :, rows], 0.0, False
    )
    dq[:, :, rows] += more_q
    back = torch.zeros_like(theirs)
    back[0][:, :, columns], back[1][:, :, columns] = more_k, more_v
    mine, works = _exchanged(rank, back)
    for work in works:
        work.wait()
    return [out, dq, dk + mine[0], dv + mine[1]]


def _exchanged(rank: int, x: Tensor) -> tuple[Tensor, list[dist.Work]]:
    came = torch.empty_like(x)
    posts = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, came, 1 - rank)]
    return came, dist.batch_isend_irecv(posts)


if __name__ == "__main__":
    sys.exit(main())
