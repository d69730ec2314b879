"""Costs of each exchange of a sequence, and the choice that `auto` makes. No torch.

Bytes are counted from the same ranges that the exchanges send. `auto` compares the time that no
computation hides: the last hop of a ring whose hops take longer to compute than to travel, and all
of an all-to-all.
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
    """Sizes of one attention over the full sequence. itemsize: bytes of one element."""

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
        """Bytes of the keys and values of one position, or of their gradients."""
        return 2 * self.batch * self.kv_heads * self.head_dim * self.itemsize

    @property
    def q_bytes(self) -> int:
        """Bytes of the queries of one position."""
        return self.batch * self.heads * self.head_dim * self.itemsize


@dataclass(frozen=True)
class ExchangeTraffic:
    """Bytes that the busiest rank sends in one attention.

    last: the bytes of the backward that it sends when no computation is left to hide them.
    """

    forward: int
    backward: int
    last: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class Choice:
    """An exchange, the number of adjacent ranks that exchange heads, and the reason."""

    comm_type: CommType
    a2a_size: int
    reason: str


@dataclass(frozen=True)
class Machine:
    """Rough speeds by which `auto` compares the exchanges.

    flops: operations per second of one rank in attention.
    node, network: bytes per second from one rank to others on its node, and to other nodes.
    call_s: seconds to start a collective or a batch of messages.
    """

    flops: float
    node: float
    network: float
    call_s: float


CPU = Machine(flops=3e10, node=1e9, network=1.2e8, call_s=2e-4)
GPU = Machine(flops=4e14, node=2e11, network=4e10, call_s=2e-5)


def a2a_problem(heads: int, kv_heads: int, ranks: int) -> str | None:
    """Return why `ranks` cannot share the heads, or None."""
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
    """Return whether `ranks` can divide these query and key-value heads evenly."""
    return heads % ranks == 0 and heads % math.lcm(kv_heads, ranks) == 0


def _or(numbers: Sequence[int]) -> str:
    """Return the numbers as text, such as `1, 2 or 4`."""
    return " or ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))


def check_a2a_size(size: int, a2a_size: int) -> None:
    """Raise LayoutError unless blocks of `a2a_size` ranks fill a group of `size`."""
    if a2a_size < 1 or size % a2a_size:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise LayoutError(
            f"a2a_size={a2a_size} ranks exchange heads, but {size} context ranks are no multiple "
            f"of that; use {_or(divisors)}"
        )


def default_a2a_size(size: int, heads: int, kv_heads: int, ranks_per_node: int | None) -> int:
    """Return for a2a+p2p the largest block that fits a node and the heads, and is not all ranks."""
    fitting = [n for n in range(2, size + 1) if size % n == 0 and _share(heads, kv_heads, n)]
    on_node = [n for n in fitting if ranks_per_node is None or ranks_per_node % n == 0]
    proper = [n for n in on_node if n < size]
    return max(proper or on_node or [1])


def traffic(
    attention: AttentionSize,
    size: int,
    comm_type: CommType,
    *,
    order: OrderName = "zigzag",
    a2a_size: int = 1,
) -> ExchangeTraffic:
    """Return the bytes of one attention over `size` ranks, forward and backward."""
    parts = SequenceOrder(attention.seq_len, size, order).parts
    longest = max(sum(map(len, part)) for part in parts)
    if comm_type == "all_gather":
        each = longest * attention.kv_bytes * (size - 1)
        return ExchangeTraffic(each, 2 * each, each)
    swapped = (
        longest * (2 * attention.q_bytes + _spread(attention, a2a_size)) if a2a_size > 1 else 0
    )
    swapped = swapped * (a2a_size - 1) // max(a2a_size, 1)
    if comm_type == "a2a":
        return ExchangeTraffic(swapped, swapped, swapped)
    # after the all-to-all each rank has only some of the heads of a position
    share = _spread(attention, a2a_size) / a2a_size if a2a_size > 1 else attention.kv_bytes
    sent, received = _ring(attention, parts, a2a_size)
    most = max(map(sum, sent), default=0)
    both = max((sum(a) + sum(b) for a, b in zip(sent, received, strict=True)), default=0)
    last = max((max(b, default=0) for b in received), default=0)
    ring = (round(n * share) for n in (most, both, last))
    forward, backward, end = ring
    return ExchangeTraffic(forward + swapped, backward + swapped, end + swapped)


@dataclass(frozen=True)
class ExchangeCall:
    """One message or collective of an attention.

    operation: "send", or a function name of comm/primitives.py.
    num_elements: elements that this rank passes in.
    is_forward: the forward makes the call, not the backward.
    is_wide: the elements are sums of at least float32.
    """

    operation: str
    num_elements: int
    is_forward: bool
    is_wide: bool = False


def exchange_calls(
    attention: AttentionSize,
    size: int,
    comm_type: CommType,
    index: int,
    *,
    order: OrderName = "zigzag",
    a2a_size: int = 1,
) -> Iterator[ExchangeCall]:
    """Yield the calls of one attention on the rank at `index` of `size`.

    a2a_size: number of ranks that exchange heads: all for a2a, 1 for p2p and all_gather.
    """
    parts = SequenceOrder(attention.seq_len, size, order).parts
    positions = sum(map(len, parts[index]))
    key_elements = attention.kv_bytes // (2 * attention.itemsize)  # of one position
    for is_forward in (True, False):
        if a2a_size > 1:
            swapped = positions * attention.q_bytes // attention.itemsize
            both = positions * _spread(attention, a2a_size) // attention.itemsize
            for num in (swapped, both, swapped):
                yield ExchangeCall("all_to_all", num, is_forward)
        if comm_type == "all_gather":
            for _ in range(2):
                yield ExchangeCall("all_gather", positions * key_elements, is_forward)
                if not is_forward:
                    yield ExchangeCall(
                        "reduce_scatter", attention.seq_len * key_elements, False, is_wide=True
                    )
        elif a2a_size < size:
            sent, received = (x[index // a2a_size] for x in _ring(attention, parts, a2a_size))
            share = _spread(attention, a2a_size) // a2a_size // attention.itemsize
            for num in (*sent, *(() if is_forward else received)):
                yield ExchangeCall("send", num * share, is_forward)


def _ring(
    attention: AttentionSize, parts: Sequence[Ranges], a2a_size: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return, for each block of ranks, the positions sent to and received from each other block."""
    blocks = [
        joined(each for part in parts[i : i + a2a_size] for each in part)
        for i in range(0, len(parts), a2a_size)
    ]
    sent = [[_num_seen(attention, to, part) for to in blocks if to is not part] for part in blocks]
    received = [
        [_num_seen(attention, part, by) for by in blocks if by is not part] for part in blocks
    ]
    return sent, received


def _spread(attention: AttentionSize, ranks: int) -> int:
    """Return the bytes of one position's keys and values after repeating heads for `ranks`."""
    return attention.kv_bytes * math.lcm(attention.kv_heads, ranks) // attention.kv_heads


def _num_seen(attention: AttentionSize, rows: Ranges, columns: Ranges) -> int:
    """Count the positions of those `columns` ranges that some query range of `rows` sees."""
    return sum(
        len(column)
        for column in columns
        if any(
            not (attention.is_causal and column.start >= row.stop)
            and not (
                attention.window is not None and row.start - column.stop + 1 >= attention.window
            )
            for row in rows
        )
    )


def choose(
    attention: AttentionSize,
    size: int,
    *,
    ranks_per_node: int | None = None,
    machine: Machine = GPU,
    order: OrderName = "zigzag",
) -> Choice:
    """Return the exchange with the least time that no computation hides.

    ranks_per_node: number of adjacent ranks of the group on one node; None: all.
    """
    crosses = ranks_per_node is not None and ranks_per_node < size
    link = machine.network if crosses else machine.node
    scores = (
        attention.batch
        * attention.heads
        * attention.seq_len**2
        / size
        / (2 if attention.is_causal else 1)
    )
    seen_share = min(1.0, (attention.window or attention.seq_len) / attention.seq_len * 2)
    compute_s = 14 * scores * seen_share * attention.head_dim / machine.flops
    costs: dict[str, tuple[float, int]] = {}

    def exposed(way: CommType, a2a_size: int, swap_link: float) -> float:
        cost = traffic(attention, size, way, order=order, a2a_size=a2a_size)
        inner = traffic(attention, size, "a2a", order=order, a2a_size=a2a_size).total
        ring = cost.total - inner
        hops = 3 * (size // a2a_size - 1)
        in_flight_s = max(0.0, ring / link - compute_s)
        end_s = (cost.last - inner // 2) / link
        return inner / swap_link + max(in_flight_s, end_s) + machine.call_s * (hops + 4)

    costs["p2p"] = exposed("p2p", 1, link), 1
    gathered = traffic(attention, size, "all_gather", order=order).total / link
    costs["all_gather"] = max(gathered / 3, gathered - compute_s / size) + 4 * machine.call_s, 1
    if _share(attention.heads, attention.kv_heads, size):
        swapped = traffic(attention, size, "a2a", order=order, a2a_size=size).total
        costs["a2a"] = swapped / link + 4 * machine.call_s, size
    inner = default_a2a_size(size, attention.heads, attention.kv_heads, ranks_per_node)
    if 1 < inner < size:
        costs["a2a+p2p"] = exposed("a2a+p2p", inner, machine.node), inner
    best = min(costs, key=lambda way: costs[way][0])
    times = ", ".join(f"{way} {s * 1e3:.3g}" for way, (s, _) in costs.items())
    where = f"nodes of {ranks_per_node}" if crosses else "one node"
    reason = (
        f"{best} for {attention.seq_len} positions, {attention.heads} heads "
        f"({attention.kv_heads} of keys) over {size} "
        f"ranks on {where}; estimated ms an attention not hidden: {times}"
    )
    return Choice(best, costs[best][1], reason)  # type: ignore[arg-type]
