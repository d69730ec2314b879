"""Attention over two ranks beside one process and a ring by hand, causal, forward and backward.

    sudo python -m benchmarks.context [--json benchmarks/results/context.json]

Each rank is on a host of its own, joined by a cable, and keeps to a core. Sides take turns in one
run, about 2 minutes; ratios are medians over rounds. Bytes are those that left the card of the
rank that sent most, headers and acknowledgements included. What it found is in
docs/context_parallel.md.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import in_turns, slowest, write
from benchmarks.data_parallel.link import INTERFACE, RATES, Link, enter_alone, shape
from benchmarks.judged import Judged, any_fails
from benchmarks.turns import ratio, spread_ms
from torchdistpackage.comm.runtime import leave, setup_distributed
from torchdistpackage.launch.workers import run_local
from torchdistpackage.layout.exchanges import EXCHANGES
from torchdistpackage.parallel import context_attention, shard_sequence
from torchdistpackage.parallel.context.order import SequenceOrder

BATCH, HEADS, WIDTH = 1, 8, 64
LENGTHS = {1024: 4, 4096: 1}
"""Positions, and how many times the rounds: a short attention is over soon, and noisier."""
ONE, HAND, MASKED = "one process", "ring by hand", "masked, gathered"
WAYS = tuple(name for name, spec in EXCHANGES.items() if spec.swap != "blocks")
SIDES = (ONE, HAND, MASKED, *WAYS)
BARS = {4096: (0.66, 0.58), 1024: (0.90, 0.75)}
"""Of one process's own time, and the aim, over the free cable."""

_aten = torch.ops.aten
_forward = _aten._scaled_dot_product_flash_attention_for_cpu
_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rates", type=lambda text: text.split(","), default=["free", "1g"])
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args(argv)
    with Link() as link:
        args = (link.hosts, options.rates, options.rounds)
        env = {**link.env, "OMP_NUM_THREADS": "1"}
        preload = ("torch", "benchmarks.context")
        ranks = run_local(rank_main, args, num_procs=2, preload=preload, env=env)
    results = {rate: joined([rank[rate] for rank in ranks]) for rate in options.rates}
    write(options.json, results)
    print("\n".join(table(results)) + "\n")
    return int(any_fails(judged(results)))


def joined(ranks: Sequence[Mapping[int, Mapping]]) -> dict[str, dict[str, dict]]:
    """Of both ranks: by length and side times of the slower one, and bytes of the busier one."""
    found: dict[str, dict[str, dict]] = {}
    for length in ranks[0]:
        times = slowest([rank[length]["times"] for rank in ranks])
        found[str(length)] = {
            name: {
                **spread_ms(times[name]),
                "bytes": max(rank[length]["bytes"].get(name, 0) for rank in ranks),
            }
            for name in SIDES
        }
    return found


def table(results: Mapping[str, Mapping]) -> Iterator[str]:
    """Rows of docs/context_parallel.md."""
    yield (
        "| S | link | " + " | ".join(f"{side}, ms" for side in SIDES) + " | p2p / one | / by hand |"
    )
    yield "|---" * (len(SIDES) + 4) + "|"
    for rate, lengths in results.items():
        for length, sides in lengths.items():
            times = [f"{sides[name]['median']:.0f}" for name in SIDES]
            ratios = [f"{ratio(sides['p2p'], sides[name])[0]:.2f}" for name in (ONE, HAND)]
            yield f"| {length} | {rate} | " + " | ".join(times + ratios) + " |"
    for length, sides in next(iter(results.values())).items():
        sent = ", ".join(f"{name} {sides[name]['bytes'] / 1e6:.2f}" for name in (*WAYS, HAND))
        yield f"\nMB sent at S {length}: {sent}"


def judged(results: Mapping[str, Mapping]) -> Iterator[Judged]:
    """The bars, round by round in the same run."""
    for length, sides in results.get("free", {}).items():
        bar, aim = BARS[int(length)]
        found, half = ratio(sides["p2p"], sides[ONE])
        yield Judged(f"S {length}, p2p of one process", found, bar, aim, half)
        found, half = ratio(sides["p2p"], sides[HAND])
        yield Judged(f"S {length}, p2p of the ring by hand", found, 1.03, None, half)
    if {"free", "1g"} <= results.keys():
        free, slow = (results[rate]["4096"]["p2p"]["median"] for rate in ("free", "1g"))
        yield Judged("S 4096, exposed of a step at 1 Gbit/s", 1 - free / slow, 0.25, None)


def rank_main(hosts: Sequence[str], rates: Sequence[str], rounds: int) -> dict[str, dict]:
    """What this rank saw, by rate and length: seconds of each round and bytes of one, by side."""
    enter_alone(hosts, int(os.environ["RANK"]))
    rank, found = setup_distributed()[0], {}
    for rate in rates:
        dist.barrier()
        if rank == 0:
            shape(hosts, RATES[rate])
        dist.barrier()
        found[rate] = {n: measured(rank, n, rounds * times) for n, times in LENGTHS.items()}
    leave()
    return found


def measured(rank: int, length: int, rounds: int) -> dict[str, Mapping]:
    """After all sides were found to compute the same."""
    torch.manual_seed(1)
    whole = [torch.randn(BATCH, HEADS, length, WIDTH) for _ in range(4)]
    parts = [shard_sequence(x, 2, group=dist.group.WORLD) for x in whole]
    mine = SequenceOrder(length, 2).parts[rank]
    places = torch.cat([torch.arange(each.start, each.stop) for each in mine])
    hidden = places[:, None] < torch.cat([places, _theirs(places)])
    sides: dict[str, Callable[[], list[Tensor] | None]] = {
        ONE: lambda: one_process(whole) if rank == 0 else None,
        HAND: lambda: by_hand(rank, *parts),
        MASKED: lambda: masked(~hidden, *parts),
        **{name: lambda name=name: ours(name, length, parts) for name in WAYS},
    }
    expected = [shard_sequence(x, 2, group=dist.group.WORLD) for x in one_process(whole)]
    sent = {}
    for name in SIDES[1:]:
        dist.barrier()
        before = _bytes_sent()
        for got, want in zip(sides[name](), expected, strict=True):
            assert (got - want).abs().max() < 1e-4 * want.abs().max(), name
        sent[name] = _bytes_sent() - before
    return {"times": in_turns(sides, rounds, dist.barrier), "bytes": sent}


def _theirs(places: Tensor) -> Tensor:
    came, works = _exchanged(dist.get_rank(), places)
    for work in works:
        work.wait()
    return came


def _bytes_sent() -> int:
    """Of the card of this rank's host since it is there."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith(INTERFACE))
    return int(line.partition(":")[2].split()[8])


def one_process(whole: Sequence[Tensor]) -> list[Tensor]:
    *inputs, grad = whole
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = F.scaled_dot_product_attention(*inputs, is_causal=True)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def ours(comm_type: str, length: int, parts: Sequence[Tensor]) -> list[Tensor]:
    """With the length told, as models tell it, so that ranks do not ask each other."""
    *inputs, grad = parts
    inputs = [x.detach().requires_grad_() for x in inputs]
    how = {"comm_type": comm_type, "seq_len": length, "group": dist.group.WORLD}
    out = context_attention(*inputs, is_causal=True, **how)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def masked(seen: Tensor, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """torch's attention with a mask, over all keys and values on every rank."""
    theirs, works = _exchanged(dist.get_rank(), torch.stack([k, v]))
    for work in works:
        work.wait()
    q, whole_k, whole_v = (
        x.detach().requires_grad_()
        for x in (q, torch.cat([k, theirs[0]], 2), torch.cat([v, theirs[1]], 2))
    )
    out = F.scaled_dot_product_attention(q, whole_k, whole_v, attn_mask=seen)
    dq, *whole = torch.autograd.grad(out, (q, whole_k, whole_v), grad)
    own, others = (torch.stack(x) for x in zip(*(y.chunk(2, 2) for y in whole), strict=True))
    mine, works = _exchanged(dist.get_rank(), others)
    for work in works:
        work.wait()
    return [out.detach(), dq, *(own + mine)]


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
