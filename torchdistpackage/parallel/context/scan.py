"""States and convolutions over a sequence that context ranks share: each holds some segments.

A rank has two segments in zigzag order, else one, and runs them as samples of one batch, each from
a zero state. What a segment does to a state is a pair (decay, state): a state h before it is
`decay * h + state` behind it. The pairs of all segments combine associatively, so the states before
the segments come from one exchange: an all-gather whose pairs each rank combines, or, where that
sends more, the steps of Hillis and Steele, in which a pair travels 1, 2, 4, ... segments. A
convolution needs the last inputs of the segments before: its halo.
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from torchdistpackage.comm import collectives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.parallel.context.model import ContextSequence
from torchdistpackage.parallel.context.order import Ranges, SequenceOrder

Times = Callable[[Tensor, Tensor], Tensor]
"""How a decay acts, on a state or on an earlier decay: `torch.mul` or `torch.matmul`."""
_Piece = tuple[int | None, int, int]
"""(index of the rank that holds it or None, where it begins there, length)."""


def num_segments(sequence: ContextSequence, num: int) -> int:
    """Return how many segments a rank has, of `num` tokens together."""
    return sequence.order(num).num_chunks // sequence.group.size()


def fold(x: Tensor, dim: int, segments: int) -> Tensor:
    """Turn the segments of `x` (B, ...) along `dim` into samples (B * segments, ...)."""
    return x.unflatten(dim, (segments, -1)).movedim(dim, 1).flatten(0, 1)


def unfold(x: Tensor, dim: int, segments: int) -> Tensor:
    """Join the segments again, the inverse of `fold`."""
    return x.unflatten(0, (-1, segments)).movedim(1, dim).flatten(dim, dim + 1)


def with_halo(x: Tensor, width: int, sequence: ContextSequence) -> Tensor:
    """Return the segments of `x` (B, C, S) as samples (B * segments, C, width + S / segments), each
    behind the `width` inputs before it; these are zeros before the sequence.
    """
    order = sequence.order(x.shape[-1])
    segments = order.num_chunks // order.size
    starts = [[r.start for r in ranges] for ranges in _chunks(order)]
    wanted = tuple(tuple(range(s - width, s) for s in of_rank) for of_rank in starts)
    halo = fetch(x, 2, wanted, order, sequence.group)
    both = (halo.unflatten(-1, (segments, width)), x.unflatten(-1, (segments, -1)))
    return torch.cat(both, -1).movedim(2, 1).flatten(0, 1)


def states_before(
    decay: Tensor, state: Tensor, times: Times, sequence: ContextSequence, segments: int
) -> Tensor:
    """Return the state before each segment of this rank, zero before the first of the sequence.

    decay, state (B * segments, ...): of each segment, as `fold` orders them.
    """
    size = sequence.group.size()
    order = SequenceOrder(segments * size, size, sequence.order_name)
    sizes = decay[0].numel(), state[0].numel()
    packed = torch.cat((decay.flatten(1), state.flatten(1)), 1)
    packed = packed.unflatten(0, (-1, segments)).transpose(0, 1)  # (segments, B, numbers)

    def pair(rows: Tensor) -> tuple[Tensor, Tensor]:
        d, s = rows.split(sizes, -1)
        shape = rows.shape[:-1]
        return d.reshape(*shape, *decay.shape[1:]), s.reshape(*shape, *state.shape[1:])

    if takes_steps(order):
        packed_states = _by_steps(packed, pair, times, order, sequence.group)
    else:
        packed_states = _by_gathering(packed, pair, times, order, sequence.group)
    return packed_states.transpose(0, 1).flatten(0, 1)


def takes_steps(order: SequenceOrder) -> bool:
    """Return whether steps send less than an all-gather, in which a pair goes to all others."""
    return 1 + len(_distances(order)) < order.size - 1


def _distances(order: SequenceOrder) -> list[int]:
    return [1 << i for i in range((order.seq_len - 2).bit_length())]


def _by_gathering(
    packed: Tensor,
    pair: Callable[[Tensor], tuple[Tensor, Tensor]],
    times: Times,
    order: SequenceOrder,
    group: Group,
) -> Tensor:
    """Gather the pairs of all segments, and combine those before this rank's."""
    decays, states = pair(collectives.all_gather(packed.contiguous(), 0, group))
    rows = [r.start for ranges in _chunks(order) for r in ranges]  # the segment of each row
    own_starts = [r.start for r in _chunks(order)[group.rank()]]
    # zeros that autograd knows to come of the gather: each rank is to run its backward
    state = states[:0].sum(0)
    before: dict[int, Tensor] = {}
    for segment in range(max(own_starts) + 1):
        before[segment] = state
        if segment < max(own_starts):
            row = rows.index(segment)
            state = times(decays[row], state) + states[row]
    return torch.stack([before[segment] for segment in own_starts])


def _by_steps(
    packed: Tensor,
    pair: Callable[[Tensor], tuple[Tensor, Tensor]],
    times: Times,
    order: SequenceOrder,
    group: Group,
) -> Tensor:
    """Let pairs travel 1, 2, 4, ... segments; zeros stand for what is before the sequence."""

    def shifted(rows: Tensor, by: int) -> tuple[Tensor, Tensor]:
        wanted = tuple(
            tuple(range(r.start - by, r.stop - by) for r in ranges) for ranges in _chunks(order)
        )
        return pair(fetch(rows, 0, wanted, order, group))

    decay, state = shifted(packed, 1)
    for distance in _distances(order):
        flat = torch.cat((decay.flatten(2), state.flatten(2)), -1)
        earlier_decay, earlier_state = shifted(flat, distance)
        state = times(decay, earlier_state) + state
        decay = times(decay, earlier_decay)
    return state


# -- what ranks hold of each other's segments ----------------------------------------------------


def fetch(
    x: Tensor, dim: int, wanted: tuple[Ranges, ...], order: SequenceOrder, group: Group
) -> Tensor:
    """Return the wanted positions of a sequence, joined; `x` is this rank's part of it along `dim`;
    zeros for those before the sequence.

    wanted: of each rank. The backward adds the gradients to the positions of their owners.
    """
    sent, to, came, parts = _routes(wanted, order, group.rank())
    rows = torch.cat([x.narrow(dim, start, n) for start, n in sent] or [x.narrow(dim, 0, 0)], dim)
    arrived = collectives.all_to_all(rows, dim, dim, group, to, came)
    missing = sum(n for start, n in parts if start is None)
    shape = [*x.shape[:dim], missing, *x.shape[dim + 1 :]]
    # joined even if nothing arrived, so that each rank runs the exchange of the backward
    pool = torch.cat((arrived, x.new_zeros(shape)), dim)
    zeros = sum(came)
    return torch.cat([pool.narrow(dim, zeros if s is None else s, n) for s, n in parts], dim)


@lru_cache(maxsize=256)
def _routes(
    wanted: tuple[Ranges, ...], order: SequenceOrder, index: int
) -> tuple[
    tuple[tuple[int, int], ...],
    tuple[int, ...],
    tuple[int, ...],
    tuple[tuple[int | None, int], ...],
]:
    """Return what the rank at `index` sends, as (start, length), how much to each rank, how much it
    gets of each, and where in that what it wants begins (None: zeros), with its length.
    """
    pieces = [[p for each in ranges for p in _pieces(each, order)] for ranges in wanted]
    sent = [[(at, n) for owner, at, n in of_rank if owner == index] for of_rank in pieces]
    to = tuple(sum(n for _, n in each) for each in sent)
    own_pieces = pieces[index]
    came = tuple(sum(n for o, _, n in own_pieces if o == rank) for rank in range(order.size))
    starts = list(accumulate(came, initial=0))
    parts: list[tuple[int | None, int]] = []
    for owner, _, n in own_pieces:
        if owner is None:
            parts.append((None, n))
        else:
            parts.append((starts[owner], n))
            starts[owner] += n
    return tuple(x for each in sent for x in each), to, came, tuple(parts)


def _pieces(wanted: range, order: SequenceOrder) -> list[_Piece]:
    """Return the pieces of a range of positions, in their order."""
    num_before = min(max(-wanted.start, 0), len(wanted))
    pieces: list[_Piece] = [(None, 0, num_before)] if num_before else []
    ranges = [
        (r, owner, at) for owner, each in enumerate(_chunks(order)) for r, at in _offsets(each)
    ]
    for chunk, owner, at in sorted(ranges, key=lambda x: x[0].start):
        start, stop = max(wanted.start, chunk.start), min(wanted.stop, chunk.stop)
        if start < stop:
            pieces.append((owner, at + start - chunk.start, stop - start))
    return pieces


def _offsets(ranges: Ranges) -> list[tuple[range, int]]:
    starts = accumulate((len(r) for r in ranges), initial=0)
    return list(zip(ranges, starts, strict=False))


@lru_cache(maxsize=64)
def _chunks(order: SequenceOrder) -> tuple[Ranges, ...]:
    """Return the segments of each rank; of `order.parts` adjacent ones are joined."""
    length = order.seq_len // order.num_chunks
    return tuple(
        tuple(range(s, s + length) for r in ranges for s in range(r.start, r.stop, length))
        for ranges in order.parts
    )
