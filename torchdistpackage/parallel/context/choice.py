"""What each way to exchange a sequence costs, and which one `auto` takes. No torch.

Bytes are counted by the same ranges that the exchanges send. What `auto` compares is the part of
them that no computation hides: of a ring its last hop, while a hop takes longer to compute than to
travel; of an all-to-all everything.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.context.order import OrderName, Ranges, SequenceOrder, joined

CommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p", "auto"]
"""Megatron-LM's names; p2p is a ring, a2a is Ulysses (arXiv:2309.14509)."""


@dataclass(frozen=True)
class AttentionSize:
    """One attention of the whole sequence. itemsize: bytes of a number."""

    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int = 1
    itemsize: int = 2
    is_causal: bool = True
    window: int | None = None

    @property
    def kv_bytes(self) -> int:
        """Of keys and values, or their gradients, of one position."""
        return 2 * self.batch * self.kv_heads * self.head_dim * self.itemsize

    @property
    def q_bytes(self) -> int:
        return self.batch * self.heads * self.head_dim * self.itemsize


@dataclass(frozen=True)
class ExchangeTraffic:
    """Bytes that the busiest rank sends, of one attention.

    last: of the backward those after whose departure nothing is left to compute.
    """

    forward: int
    backward: int
    last: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class Choice:
    """A way, the ranks next to each other that exchange heads, and why."""

    comm_type: CommType
    a2a_size: int
    reason: str


@dataclass(frozen=True)
class Machine:
    """Rough numbers by which ways are compared, not what a run is told to take.

    flops: of a rank in attention, a second. node, network: bytes a second of a rank to others on
    its node, and to other nodes. call_s: of a collective or a batch of messages.
    """

    flops: float
    node: float
    network: float
    call_s: float


CPU = Machine(flops=3e10, node=1e9, network=1.2e8, call_s=2e-4)
GPU = Machine(flops=4e14, node=2e11, network=4e10, call_s=2e-5)


def a2a_problem(heads: int, kv_heads: int, ranks: int) -> str | None:
    """Why `ranks` cannot share the heads, or None."""
    shared = math.lcm(kv_heads, ranks)
    if heads % ranks == 0 and heads % shared == 0:
        return None
    fitting = [n for n in range(1, heads + 1) if _share(heads, kv_heads, n)]
    return (
        f"a2a gives each of {ranks} ranks whole heads, but {heads} heads of queries and "
        f"{kv_heads} of keys and values cannot be shared by them; use p2p or all_gather, or "
        f"{_or(fitting)} ranks"
    )


def _share(heads: int, kv_heads: int, ranks: int) -> bool:
    return heads % ranks == 0 and heads % math.lcm(kv_heads, ranks) == 0


def _or(numbers: Sequence[int]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))


def check_a2a_size(size: int, a2a_size: int) -> None:
    """Raises LayoutError unless blocks of `a2a_size` ranks fill a group of `size`."""
    if a2a_size < 1 or size % a2a_size:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise LayoutError(
            f"a2a_size={a2a_size} ranks exchange heads, but {size} context ranks are no multiple "
            f"of that; use {_or(divisors)}"
        )


def default_a2a_size(size: int, heads: int, kv_heads: int, ranks_per_node: int | None) -> int:
    """Of a2a+p2p: as many neighbours as share a node and the heads, but not all if others do."""
    fitting = [n for n in range(2, size + 1) if size % n == 0 and _share(heads, kv_heads, n)]
    near = [n for n in fitting if ranks_per_node is None or ranks_per_node % n == 0]
    both = [n for n in near if n < size]
    return max(both or near or [1])


def traffic(
    of: AttentionSize,
    size: int,
    comm_type: CommType,
    *,
    order: OrderName = "zigzag",
    a2a_size: int = 1,
) -> ExchangeTraffic:
    """Bytes of one attention over `size` ranks, forward and backward."""
    parts = SequenceOrder(of.seq_len, size, order).parts
    longest = max(sum(map(len, part)) for part in parts)
    if comm_type == "all_gather":
        each = longest * of.kv_bytes * (size - 1)
        return ExchangeTraffic(each, 2 * each, each)
    swapped = longest * (2 * of.q_bytes + _spread(of, a2a_size)) if a2a_size > 1 else 0
    swapped = swapped * (a2a_size - 1) // max(a2a_size, 1)
    if comm_type == "a2a":
        return ExchangeTraffic(swapped, swapped, swapped)
    # of a position each rank then has a part of the heads alone
    share = _spread(of, a2a_size) / a2a_size if a2a_size > 1 else of.kv_bytes
    sent, came = _ring(of, parts, a2a_size)
    most = max(map(sum, sent), default=0)
    both = max((sum(a) + sum(b) for a, b in zip(sent, came, strict=True)), default=0)
    last = max((max(b, default=0) for b in came), default=0)
    ring = (round(n * share) for n in (most, both, last))
    forward, backward, end = ring
    return ExchangeTraffic(forward + swapped, backward + swapped, end + swapped)


@dataclass(frozen=True)
class ExchangeCall:
    """One call of an attention. operation: "send", or its name in comm/primitives.py; num_elements:
    that this rank gives. is_forward: not of the backward. is_wide: sums of at least float32."""

    operation: str
    num_elements: int
    is_forward: bool
    is_wide: bool = False


def exchange_calls(
    of: AttentionSize,
    size: int,
    comm_type: CommType,
    index: int,
    *,
    order: OrderName = "zigzag",
    a2a_size: int = 1,
) -> Iterator[ExchangeCall]:
    """What the rank at `index` of `size` calls in one attention.

    a2a_size: ranks that exchange heads: of a2a all, of p2p and all_gather 1.
    """
    parts = SequenceOrder(of.seq_len, size, order).parts
    mine = sum(map(len, parts[index]))
    keys = of.kv_bytes // (2 * of.itemsize)  # of one position
    for is_forward in (True, False):
        if a2a_size > 1:
            swapped = mine * of.q_bytes // of.itemsize
            both = mine * _spread(of, a2a_size) // of.itemsize
            for num in (swapped, both, swapped):
                yield ExchangeCall("all_to_all", num, is_forward)
        if comm_type == "all_gather":
            for _ in range(2):
                yield ExchangeCall("all_gather", mine * keys, is_forward)
                if not is_forward:
                    yield ExchangeCall("reduce_scatter", of.seq_len * keys, False, is_wide=True)
        elif a2a_size < size:
            sent, came = (x[index // a2a_size] for x in _ring(of, parts, a2a_size))
            share = _spread(of, a2a_size) // a2a_size // of.itemsize
            for num in (*sent, *(() if is_forward else came)):
                yield ExchangeCall("send", num * share, is_forward)


def _ring(
    of: AttentionSize, parts: Sequence[Ranges], a2a_size: int
) -> tuple[list[list[int]], list[list[int]]]:
    """For each block of ranks the positions that go to, and come from, each other block."""
    blocks = [
        joined(each for part in parts[i : i + a2a_size] for each in part)
        for i in range(0, len(parts), a2a_size)
    ]
    sent = [[_num_seen(of, to, part) for to in blocks if to is not part] for part in blocks]
    came = [[_num_seen(of, part, by) for by in blocks if by is not part] for part in blocks]
    return sent, came


def _spread(of: AttentionSize, ranks: int) -> int:
    """Bytes of keys and values of a position, with as many heads as `ranks` can share."""
    return of.kv_bytes * math.lcm(of.kv_heads, ranks) // of.kv_heads


def _num_seen(of: AttentionSize, rows: Ranges, columns: Ranges) -> int:
    """Positions of `columns` in ranges of which one of the queries `rows` sees some."""
    return sum(
        len(column)
        for column in columns
        if any(
            not (of.is_causal and column.start >= row.stop)
            and not (of.window is not None and row.start - column.stop + 1 >= of.window)
            for row in rows
        )
    )


def choose(
    of: AttentionSize,
    size: int,
    *,
    ranks_per_node: int | None = None,
    machine: Machine = GPU,
    order: OrderName = "zigzag",
) -> Choice:
    """The way with the least time that no computation hides.

    ranks_per_node: of the group's ranks, those next to each other on one node; None: all.
    """
    crosses = ranks_per_node is not None and ranks_per_node < size
    link = machine.network if crosses else machine.node
    scores = of.batch * of.heads * of.seq_len**2 / size / (2 if of.is_causal else 1)
    seen = min(1.0, (of.window or of.seq_len) / of.seq_len * 2)
    compute_s = 14 * scores * seen * of.head_dim / machine.flops
    found: dict[str, tuple[float, int]] = {}

    def exposed(way: CommType, a2a_size: int, swap_link: float) -> float:
        cost = traffic(of, size, way, order=order, a2a_size=a2a_size)
        inner = traffic(of, size, "a2a", order=order, a2a_size=a2a_size).total
        ring = cost.total - inner
        hops = 3 * (size // a2a_size - 1)
        in_flight_s = max(0.0, ring / link - compute_s)
        end_s = (cost.last - inner // 2) / link
        return inner / swap_link + max(in_flight_s, end_s) + machine.call_s * (hops + 4)

    found["p2p"] = exposed("p2p", 1, link), 1
    gathered = traffic(of, size, "all_gather", order=order).total / link
    found["all_gather"] = max(gathered / 3, gathered - compute_s / size) + 4 * machine.call_s, 1
    if _share(of.heads, of.kv_heads, size):
        swapped = traffic(of, size, "a2a", order=order, a2a_size=size).total
        found["a2a"] = swapped / link + 4 * machine.call_s, size
    inner = default_a2a_size(size, of.heads, of.kv_heads, ranks_per_node)
    if 1 < inner < size:
        found["a2a+p2p"] = exposed("a2a+p2p", inner, machine.node), inner
    best = min(found, key=lambda way: found[way][0])
    times = ", ".join(f"{way} {s * 1e3:.3g}" for way, (s, _) in found.items())
    where = f"nodes of {ranks_per_node}" if crosses else "one node"
    reason = (
        f"{best} for {of.seq_len} positions, {of.heads} heads ({of.kv_heads} of keys) over {size} "
        f"ranks on {where}; estimated ms an attention not hidden: {times}"
    )
    return Choice(best, found[best][1], reason)  # type: ignore[arg-type]
