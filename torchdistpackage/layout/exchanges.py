"""The exchanges of a sequence over context ranks, one row each. No torch.

The values of `comm_type` and of the key, the class that exchanges keys and values, the calls and
bytes in `tdp plan`, the time that `auto` compares, refusals, test cases, and the table of
docs/context_parallel.md (scripts/docs) follow from a row.

An exchange has two halves. The ranks, or blocks of adjacent ranks, may first trade heads for
sequence by an all-to-all, which is the same for all that do. Then each block gets the keys and
values of the others; a row says how.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.partition import either
from torchdistpackage.text import markdown_table

Blocks = Sequence[tuple[range, ...]]
"""Ranges of positions that each block of ranks holds."""


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

    def spread(self, ranks: int) -> int:
        """Return `kv_bytes` after heads are repeated so that each of `ranks` gets a full head."""
        return self.kv_bytes * math.lcm(self.kv_heads, ranks) // self.kv_heads


@dataclass(frozen=True)
class ExchangeTraffic:
    """Bytes that the busiest rank sends in one attention.

    last: bytes sent in the backward when no computation is left to hide them.
    """

    forward: int
    backward: int
    last: int

    @property
    def total(self) -> int:
        return self.forward + self.backward


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


@dataclass(frozen=True)
class TimeInputs:
    """Inputs of an exchange's time between blocks.

    sent: its traffic. link: bytes per second. compute_s: seconds of a rank's computation in the
    attention. size: ranks of the group. num_blocks: number of blocks that exchange keys and values.
    """

    sent: ExchangeTraffic
    link: float
    compute_s: float
    size: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ExchangeSpec:
    """One exchange.

    exchange: "module:class" of the `KeyExchange` between blocks, which also has the backward; ""
        where one block is all ranks, so that nothing is left to exchange.
    swap: ranks that trade heads for sequence first: none, all, or blocks of `a2a_size` ranks.
    sent: bytes that travel between blocks for each position's keys and values on a rank.
    calls: calls between blocks of the rank in the block at an index, whose positions have so many
        elements, in one direction.
    time: (seconds that no computation hides, calls that a rank starts), for `auto`.
    heads_problem: why so many ranks (those that trade heads, else all) cannot serve these heads of
        queries and of keys; None if they can.
    does: its words in the text of parallel.cp_comm_type.
    formula, causal, hidden, wins: its row of docs/context_parallel.md.
    """

    name: str
    sent: Callable[[AttentionSize, Blocks, float], ExchangeTraffic]
    calls: Callable[[AttentionSize, Blocks, int, int, bool], Iterator[ExchangeCall]]
    time: Callable[[TimeInputs], tuple[float, int]]
    exchange: str = ""
    swap: Literal["none", "all", "blocks"] = "none"
    heads_problem: Callable[[int, int, int], str | None] = lambda heads, kv_heads, ranks: None
    does: str = ""
    formula: str = ""
    causal: str = ""
    hidden: str = ""
    wins: str = ""

    def swap_size(self, size: int, block_size: int) -> int:
        """Return how many of `size` ranks trade heads, where blocks have `block_size` ranks."""
        return {"none": 1, "all": size, "blocks": block_size}[self.swap]


def a2a_problem(heads: int, kv_heads: int, ranks: int) -> str | None:
    """Return why `ranks` cannot divide the heads among them, or None."""
    if shares_heads(heads, kv_heads, ranks):
        return None
    fitting = [n for n in range(1, heads + 1) if shares_heads(heads, kv_heads, n)]
    return (
        f"a2a gives each of {ranks} ranks whole heads, but {heads} heads of queries and "
        f"{kv_heads} of keys and values cannot be shared by them; use p2p or all_gather, or "
        f"{either(fitting)} ranks"
    )


def shares_heads(heads: int, kv_heads: int, ranks: int) -> bool:
    """Return whether `ranks` can divide these query and key-value heads evenly."""
    return heads % ranks == 0 and heads % math.lcm(kv_heads, ranks) == 0


def _ring_bytes(attention: AttentionSize, blocks: Blocks, kv_bytes: float) -> ExchangeTraffic:
    sent, received = _positions(attention, blocks)
    most = max(map(sum, sent), default=0)
    both = max((sum(a) + sum(b) for a, b in zip(sent, received, strict=True)), default=0)
    last = max((max(b, default=0) for b in received), default=0)
    return ExchangeTraffic(*(round(n * kv_bytes) for n in (most, both, last)))


def _ring_calls(
    attention: AttentionSize, blocks: Blocks, index: int, elements: int, is_forward: bool
) -> Iterator[ExchangeCall]:
    sent, received = (by_block[index] for by_block in _positions(attention, blocks))
    for num in (*sent, *(() if is_forward else received)):
        yield ExchangeCall("send", num * elements, is_forward)


def _ring_time(inputs: TimeInputs) -> tuple[float, int]:
    # hops hide behind the computation; only the last gradients have none left
    in_flight_s = max(0.0, inputs.sent.total / inputs.link - inputs.compute_s)
    return max(in_flight_s, inputs.sent.last / inputs.link), 3 * (inputs.num_blocks - 1) + 4


def _positions(attention: AttentionSize, blocks: Blocks) -> tuple[list[list[int]], list[list[int]]]:
    """Return, for each block of ranks, the positions sent to and received from each other block."""
    sent = [[_num_seen(attention, to, part) for to in blocks if to is not part] for part in blocks]
    received = [
        [_num_seen(attention, part, by) for by in blocks if by is not part] for part in blocks
    ]
    return sent, received


def _num_seen(attention: AttentionSize, rows: tuple[range, ...], columns: tuple[range, ...]) -> int:
    """Count the positions in `columns` that some query position in `rows` attends to."""
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


def gathered_bytes(attention: AttentionSize, blocks: Blocks, kv_bytes: float) -> ExchangeTraffic:
    """Return the bytes of all-gathers, and of a reduce-scatter of the gradients."""
    longest = max(sum(map(len, block)) for block in blocks)
    each = round(longest * kv_bytes * (len(blocks) - 1))
    return ExchangeTraffic(each, 2 * each, each)


def gathered_calls(
    attention: AttentionSize, blocks: Blocks, index: int, elements: int, is_forward: bool
) -> Iterator[ExchangeCall]:
    """Yield an all-gather of keys and one of values, and in the backward their reduce-scatters."""
    positions = sum(map(len, blocks[index]))
    for _ in range(2):
        yield ExchangeCall("all_gather", positions * (elements // 2), is_forward)
        if not is_forward:
            num_elements = attention.seq_len * (elements // 2)
            yield ExchangeCall("reduce_scatter", num_elements, False, is_wide=True)


def gathered_time(inputs: TimeInputs) -> tuple[float, int]:
    """Return the time of `gathered_calls`: a rank's work on its own slice hides some of it."""
    total_s = inputs.sent.total / inputs.link
    return max(total_s / 3, total_s - inputs.compute_s / inputs.size), 4


def _no_bytes(attention: AttentionSize, blocks: Blocks, kv_bytes: float) -> ExchangeTraffic:
    return ExchangeTraffic(0, 0, 0)


def _no_calls(
    attention: AttentionSize, blocks: Blocks, index: int, elements: int, is_forward: bool
) -> Iterator[ExchangeCall]:
    return iter(())


def _swap_time(inputs: TimeInputs) -> tuple[float, int]:
    return 0.0, 4


_CLASSES = "torchdistpackage.parallel.context.exchange"

EXCHANGES: Mapping[str, ExchangeSpec] = {
    spec.name: spec
    for spec in (
        ExchangeSpec(
            "p2p",
            _ring_bytes,
            _ring_calls,
            _ring_time,
            f"{_CLASSES}:Ring",
            does="passes them around a ring",
            formula="6 h D S b (n-1)/n",
            causal="about 3/4 of it",
            hidden="all but the gradients of the last hop",
            wins="long sequences, any number of heads, slow links",
        ),
        ExchangeSpec(
            "all_gather",
            gathered_bytes,
            gathered_calls,
            gathered_time,
            f"{_CLASSES}:GatheredKeys",
            does="collects them",
            formula="6 h D S b (n-1)/n",
            causal="the same",
            hidden="a rank's own part of the work",
            wins="few calls: short sequences, windows and documents on many ranks",
        ),
        ExchangeSpec(
            "a2a",
            _no_bytes,
            _no_calls,
            _swap_time,
            swap="all",
            heads_problem=a2a_problem,
            does="trades parts of the sequence for attention heads",
            formula="4 (H + h) D S b (n-1)/n²",
            causal="the same",
            hidden="nothing",
            wins="fast links inside a node, many ranks; heads must be divisible",
        ),
        ExchangeSpec(
            "a2a+p2p",
            _ring_bytes,
            _ring_calls,
            _ring_time,
            f"{_CLASSES}:Ring",
            swap="blocks",
            heads_problem=a2a_problem,
            does="does both a2a and p2p",
            formula="`a2a` among `a2a_size` neighbours, `p2p` among these blocks",
            hidden="as both",
            wins="several nodes, `a2a_size` ranks on each",
        ),
    )
}


COMM_TYPES = (*EXCHANGES, "auto")
"""Megatron-LM's names; p2p is a ring, a2a is Ulysses (arXiv:2309.14509)."""


def check_comm_type(comm_type: str) -> None:
    """Raise LayoutError unless `comm_type` is one of `COMM_TYPES`."""
    if comm_type not in COMM_TYPES:
        raise LayoutError(f"comm_type={comm_type!r}; use one of {', '.join(COMM_TYPES)}")


def page_rows() -> str:
    """Return the table of docs/context_parallel.md."""
    head = ("`comm_type`", "bytes, not causal", "causal, zigzag", "hidden under computation")
    rows = ((f"`{x.name}`", x.formula, x.causal, x.hidden, x.wins) for x in EXCHANGES.values())
    return markdown_table((*head, "wins"), rows)
