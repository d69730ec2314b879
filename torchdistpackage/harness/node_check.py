"""Check the nodes of a run before its first step: a matmul, a memory copy and messages of pairs.

Every rank measures at once, since the ranks of a node share it in a run too. The best of many short
trials counts, so that a busy moment condemns nobody. If a node seems slow, all measure again for
longer, and the best of both counts. A matmul of whole numbers has one right result.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from torchdistpackage.comm import primitives
from torchdistpackage.comm.creation import world
from torchdistpackage.harness.bench.report import Pair
from torchdistpackage.harness.bench.request import Request, Round, tournament
from torchdistpackage.harness.calls import compare
from torchdistpackage.harness.comm_test import world_only
from torchdistpackage.harness.device_speed import times_s
from torchdistpackage.harness.gpu_facts import GpuFacts, gpu_facts
from torchdistpackage.harness.measure import time_pairs
from torchdistpackage.harness.node_verdict import BadNode, RankSpeed, bad_nodes

CHECK_S = 5.0
"""Seconds of a check on an ordinary network; three times that if a node is slow."""
_MATMUL_SHARE, _COPY_SHARE = 0.3, 0.2
_MAX_ROUNDS = 8
"""Largest number of other nodes that a node exchanges messages with."""
_PAIRS = Request(sizes_bytes=(2**20,), iterations=4, warmup=1)
_MOST_ITERATIONS = 200
_PERIOD = 64
"""Period of the rows of both factors; sizes are multiples of it."""


class _CheckSizes(NamedTuple):
    """matmul: rows of a factor. buffer: bytes of the buffers that are copied in turn, more than a
    cache holds. copied: bytes of a copy, which is short beside a time slice of a busy host.
    """

    matmul: int
    buffer: int
    copied: int
    dtype: torch.dtype
    largest: int
    """Largest number in a factor, so that every sum and result is exact in `dtype`."""


_ON_HOST = _CheckSizes(128, 2**25, 2**19, torch.float32, 61)
_ON_GPU = _CheckSizes(4096, 2**28, 2**28, torch.bfloat16, 1)


@dataclass(frozen=True, slots=True)
class NodeCheck:
    """The findings, equal on all ranks. notes: what GPUs report of nodes that are not named."""

    bad: tuple[BadNode, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def problem(self) -> str:
        """Return the error with the worst node first, or "" if no node is bad."""
        if not self.bad:
            return ""
        first, *others = self.bad
        # in the words by which all ranks' reports blame that rank (environment/failure.py)
        lines = [
            f"the node check failed on rank {first.rank} on {first.host}, which {first.reason}; "
            f"leave out {','.join(node.host for node in self.bad)}"
        ]
        lines += [f"  and on rank {x.rank} on {x.host}, which {x.reason}" for x in others]
        return "\n".join(lines)


@torch.no_grad()
def check_nodes(
    host: str,
    device: torch.device,
    seconds: float = CHECK_S,
    facts: Callable[[], GpuFacts] | None = None,
) -> NodeCheck:
    """Measure this rank's node and return which nodes of the run to leave out; all ranks call it.

    host: name of this node, equal on its ranks. facts: asks the devices of this node; by default
    nvidia-smi on the first rank of a node with GPUs.

    Raises:
        DataCorruptionError: a message between two nodes arrived wrong; on every rank, naming both.
    """
    if facts is None and device.type == "cuda":
        facts = gpu_facts
    hosts = cast(list[str], primitives.reduce_objects(host, list))
    rank = world().rank()
    asks = facts if hosts.index(host) == rank else None
    measured = _measure(hosts, device, seconds, asks)
    check = _judge(measured, hosts)
    if any(node.times_slower < float("inf") for node in check.bad):
        # another program may have been busy there
        again = _measure(hosts, device, 2 * seconds, asks)
        check = _judge(measured.best_with(again), hosts)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the run plans with all memory of the device
    return check


class _NodeTimes(NamedTuple):
    """Times that this rank measured; the pairs are those of all ranks."""

    speed: RankSpeed
    pairs_s: Mapping[Pair, float]

    def best_with(self, other: "_NodeTimes") -> "_NodeTimes":
        """Return the best time of both; what was wrong once is wrong."""
        best_s = {k: min(x, other.speed.best_s[k]) for k, x in self.speed.best_s.items()}
        wrong = self.speed.wrong or other.speed.wrong
        speed = replace(other.speed, best_s=best_s, wrong=wrong)
        return _NodeTimes(speed, {k: min(x, other.pairs_s[k]) for k, x in self.pairs_s.items()})


def _measure(
    hosts: Sequence[str],
    device: torch.device,
    seconds: float,
    facts: Callable[[], GpuFacts] | None,
) -> _NodeTimes:
    rank = world().rank()
    sizes = _ON_GPU if device.type == "cuda" else _ON_HOST
    with ThreadPoolExecutor(1) if facts else nullcontext() as pool:
        # beside the matmul, since an idle GPU lowers its clocks
        answer = pool.submit(facts) if pool is not None and facts is not None else None
        matmul_s, wrong = _matmul(sizes, device, _MATMUL_SHARE * seconds)
        copy_s, wrong_copy = _copy(sizes, device, _COPY_SHARE * seconds)
        findings = answer.result().findings if answer is not None else ()
    best_s = {"a matmul": matmul_s, "a copy in memory": copy_s}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    speed = RankSpeed(rank, hosts[rank], name, best_s, wrong or wrong_copy, findings)
    pairs_s = _pairs(rounds_of(hosts), (1 - _MATMUL_SHARE - _COPY_SHARE) * seconds)
    return _NodeTimes(speed, pairs_s)


def _judge(measured: _NodeTimes, hosts: Sequence[str]) -> NodeCheck:
    """Return the findings about the measurements of all ranks, the same on each."""

    def judge(speeds: list[object]) -> NodeCheck:
        return judged(cast(list[RankSpeed], speeds), measured.pairs_s, hosts)

    return cast(NodeCheck, primitives.reduce_objects(measured.speed, judge))


def judged(
    speeds: Sequence[RankSpeed], pairs_s: Mapping[Pair, float], hosts: Sequence[str]
) -> NodeCheck:
    """Return the bad nodes, each with what its devices report, and notes about other nodes."""
    facts = {speed.host: "; ".join(speed.facts) for speed in speeds if speed.facts}
    bad = tuple(
        BadNode(x.host, x.rank, f"{x.reason} ({facts[x.host]})", x.times_slower)
        if x.host in facts
        else x
        for x in bad_nodes(speeds, pairs_s, hosts)
    )
    named = {node.host for node in bad}
    return NodeCheck(bad, tuple(f"{x}: {text}" for x, text in facts.items() if x not in named))


def rounds_of(hosts: Sequence[str]) -> list[Round]:
    """Return rounds in which each rank meets the rank of its index on another node.

    hosts: node of each rank. Of many nodes each meets _MAX_ROUNDS others.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    of_node = list(ranks.values())
    rounds = tournament(len(of_node)) if len(of_node) > 1 else []
    number = min(_MAX_ROUNDS, len(rounds))
    chosen = [rounds[i * len(rounds) // number] for i in range(number)]
    return [
        tuple(
            (min(pair), max(pair))
            for a, b in part
            for pair in zip(of_node[a], of_node[b], strict=False)
        )
        for part in chosen
    ]


def _pairs(rounds: Sequence[Round], budget_s: float) -> dict[Pair, float]:
    """Return the best time of each pair, of as many messages as `budget_s` seconds allow."""
    begin_s = time.monotonic()
    with world_only():
        times_s = time_pairs(rounds, _PAIRS)
        took_s = cast(float, primitives.reduce_objects(time.monotonic() - begin_s, max))
        number = min(int(_PAIRS.iterations * (budget_s / took_s - 1)), _MOST_ITERATIONS)
        more = replace(_PAIRS, iterations=number)
        more_s = time_pairs(rounds, more) if number > 0 else times_s
    return {pair: min(*times_s[pair], *more_s[pair]) for pair in times_s}


def _matmul(sizes: _CheckSizes, device: torch.device, budget_s: float) -> tuple[float, str]:
    """Return the best time of a matmul, and which element of a result was wrong, or ""."""
    left, right, expected = _factors(sizes, device)
    result = torch.empty_like(expected)
    num_wrong = torch.zeros((), dtype=torch.int64, device=device)

    def multiply() -> None:
        torch.mm(left, right, out=result)
        num_wrong.add_((result != expected).sum())

    best_s = min(times_s(multiply, device, budget_s))
    if not (number := int(num_wrong)):
        return best_s, ""
    last = compare(result, expected) or f"{number} elements in all trials, none in the last"
    return best_s, f"a matmul of whole numbers {last}"


def _factors(sizes: _CheckSizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return two factors of whole numbers and their matmul, which follows from one period.

    Element (i, k) of the first is x[i + k] and (k, j) of the second y[k + j], both periodic, so
    that (i, j) of the result depends on j - i alone.
    """
    place = torch.arange(_PERIOD)
    spread = 2 * sizes.largest + 1
    x = (place**2 * 7 + place * 3) % spread - sizes.largest
    y = (place**2 * 5 + place * 11 + 1) % spread - sizes.largest
    shift = (place[:, None] + place[None, :]) % _PERIOD
    sums = (x[:, None] * y[shift]).sum(0) * (sizes.matmul // _PERIOD)
    number = torch.arange(sizes.matmul)
    together = (number[:, None] + number[None, :]) % _PERIOD
    apart = (number[None, :] - number[:, None]) % _PERIOD
    return (
        x[together].to(device, sizes.dtype),
        y[together].to(device, sizes.dtype),
        sums[apart].to(device, sizes.dtype),
    )


def _copy(sizes: _CheckSizes, device: torch.device, budget_s: float) -> tuple[float, str]:
    """Return the best time of a copy in the device's memory, and what was copied wrong, or ""."""
    source = torch.arange(sizes.buffer // 8, device=device)
    target = torch.zeros_like(source)
    slices = zip(target.split(sizes.copied // 8), source.split(sizes.copied // 8), strict=True)
    turns = itertools.cycle(slices)

    def copy() -> None:
        to, from_ = next(turns)
        to.copy_(from_)

    best_s = min(times_s(copy, device, budget_s))
    target.copy_(source)
    problem = compare(target, source)
    return best_s, f"a copy in memory {problem}" if problem else ""
