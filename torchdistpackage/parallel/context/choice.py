"""Costs of each exchange of a sequence, and the choice that `auto` makes. No torch.

Bytes are counted from the same ranges that the exchanges send. `auto` compares the time that no
computation hides: the last hop of a ring whose hops take longer to compute than to travel, and all
of an all-to-all. layout/exchanges.py has what differs between exchanges, a row for each.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.exchanges import (
    EXCHANGES,
    AttentionSize,
    ExchangeCall,
    ExchangeSpec,
    ExchangeTraffic,
    TimeInputs,
    shares_heads,
)
from torchdistpackage.layout.partition import either
from torchdistpackage.parallel.context.order import OrderName, Ranges, SequenceOrder, joined


@dataclass(frozen=True)
class Choice:
    """An exchange, the number of adjacent ranks that exchange heads, and the reason."""

    comm_type: str
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


def check_a2a_size(size: int, a2a_size: int) -> None:
    """Raise LayoutError unless blocks of `a2a_size` ranks fill a group of `size`."""
    if a2a_size < 1 or size % a2a_size:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise LayoutError(
            f"a2a_size={a2a_size} ranks exchange heads, but {size} context ranks are not a "
            f"multiple of that; use {either(divisors)}"
        )


def default_a2a_size(size: int, heads: int, kv_heads: int, ranks_per_node: int | None) -> int:
    """Return for a2a+p2p the largest block that fits a node and the heads, and is not all ranks."""
    fitting = [n for n in range(2, size + 1) if size % n == 0 and shares_heads(heads, kv_heads, n)]
    on_node = [n for n in fitting if ranks_per_node is None or ranks_per_node % n == 0]
    proper = [n for n in on_node if n < size]
    return max(proper or on_node or [1])


def traffic(
    attention: AttentionSize,
    size: int,
    comm_type: str,
    *,
    order: OrderName = "zigzag",
    a2a_size: int = 1,
) -> ExchangeTraffic:
    """Return the bytes of one attention over `size` ranks, forward and backward."""
    parts = SequenceOrder(attention.seq_len, size, order).parts
    swapped = _swapped(attention, parts, a2a_size)
    sent = _between(EXCHANGES[comm_type], attention, parts, a2a_size)
    return ExchangeTraffic(sent.forward + swapped, sent.backward + swapped, sent.last + swapped)


def _swapped(attention: AttentionSize, parts: Sequence[Ranges], a2a_size: int) -> int:
    """Return the bytes that a rank sends in one direction to exchange heads for sequence."""
    if a2a_size == 1:
        return 0
    longest = max(sum(map(len, part)) for part in parts)
    bytes_of_position = 2 * attention.q_bytes + attention.spread(a2a_size)
    return longest * bytes_of_position * (a2a_size - 1) // a2a_size


def _between(
    spec: ExchangeSpec, attention: AttentionSize, parts: Sequence[Ranges], a2a_size: int
) -> ExchangeTraffic:
    """Return the bytes between blocks of `a2a_size` ranks."""
    # after the all-to-all each rank has only some of the heads of a position
    share = attention.spread(a2a_size) / a2a_size if a2a_size > 1 else attention.kv_bytes
    return spec.sent(attention, _blocks(parts, a2a_size), share)


def _blocks(parts: Sequence[Ranges], a2a_size: int) -> list[Ranges]:
    """Return the positions of each block of `a2a_size` adjacent ranks."""
    return [
        joined(each for part in parts[i : i + a2a_size] for each in part)
        for i in range(0, len(parts), a2a_size)
    ]


def exchange_calls(
    attention: AttentionSize,
    size: int,
    comm_type: str,
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
    blocks, elements = _blocks(parts, a2a_size), attention.spread(a2a_size) // attention.itemsize
    for is_forward in (True, False):
        if a2a_size > 1:
            swapped = positions * attention.q_bytes // attention.itemsize
            for num in (swapped, positions * elements, swapped):
                yield ExchangeCall("all_to_all", num, is_forward)
        calls = EXCHANGES[comm_type].calls
        yield from calls(attention, blocks, index // a2a_size, elements // a2a_size, is_forward)


def choose(
    attention: AttentionSize,
    size: int,
    *,
    ranks_per_node: int | None = None,
    machine: Machine = GPU,
    order: OrderName = "zigzag",
) -> Choice:
    """Return the exchange with the shortest time that no computation hides.

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
    heads = attention.heads, attention.kv_heads
    parts = SequenceOrder(attention.seq_len, size, order).parts
    block_size = default_a2a_size(size, *heads, ranks_per_node)
    costs: dict[str, tuple[float, int]] = {}
    for name, spec in EXCHANGES.items():
        a2a_size = spec.swap_size(size, block_size)
        if spec.swap == "blocks" and not 1 < a2a_size < size:
            continue
        if spec.heads_problem(*heads, size if spec.swap == "none" else a2a_size):
            continue
        sent = _between(spec, attention, parts, a2a_size)
        inputs = TimeInputs(sent, link, compute_s, size, size // a2a_size)
        wait_s, calls = spec.time(inputs)
        swap_link = machine.node if spec.swap == "blocks" else link
        swap_s = 2 * _swapped(attention, parts, a2a_size) / swap_link
        costs[name] = swap_s + wait_s + machine.call_s * calls, a2a_size
    best = min(costs, key=lambda name: costs[name][0])
    times = ", ".join(f"{name} {s * 1e3:.3g}" for name, (s, _) in costs.items())
    where = f"nodes of {ranks_per_node}" if crosses else "one node"
    reason = (
        f"{best} for {attention.seq_len} positions, {attention.heads} heads "
        f"({attention.kv_heads} of keys) over {size} "
        f"ranks on {where}; estimated ms an attention not hidden: {times}"
    )
    return Choice(best, costs[best][1], reason)
