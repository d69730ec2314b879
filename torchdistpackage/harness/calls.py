"""Each operation of comm/collective_table.py as two calls, ours and torch's, with known data.

Both calls do the same on tensors that are made beforehand, so what differs between their times is
our own work. Rooms start as zeros, which no rank sends.

The data says which rank wrote it and where. Every number is an integer from 1 to 61, so each dtype
holds it exactly, and it follows from the rank and the place as if drawn by lot: what comes from
another rank, shifted, or with parts exchanged differs almost everywhere. Where a sum is formed,
each place has one rank that writes its number there, so the sums are such numbers too, at any
number of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from torchdistpackage.comm import by_torch, p2p, primitives
from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import tpc

Like = tuple[torch.dtype, torch.device]
Call = Callable[[], Tensor | None]
"""A call that returns the tensor that arrived, or None on a rank that only sends."""


LARGEST = 61
"""Largest number of a pattern. It is prime, so ranks fewer than that apart differ at every
position. No number is 0, so elements that were never written show in a buffer of zeros."""

_EXACT_TO = {
    torch.int8: 2**7 - 1,
    torch.uint8: 2**8 - 1,
    torch.bfloat16: 2**8,
    torch.float16: 2**11,
}
_BY_RANK, _BY_PLACE, _MODULUS = 17, 1_103_515_245, 2**31 - 1


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One rank's role in a call.

    group: of `ranks`, or one that contains them. ranks: global. rank: mine, one of them.
    """

    group: Group
    ranks: tuple[int, ...]
    rank: int

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)

    @property
    def peer(self) -> int:
        """The other rank of a pair."""
        return self.ranks[1 - self.index]

    def like(self, dtype: torch.dtype) -> Like:
        """Return `dtype` with the device of the group."""
        return dtype, primitives.device_of(self.group)


def rank_pattern(rank: int, number: int, like: Like, first: int = 0) -> Tensor:
    """Return `number` elements of the endless pattern of `rank`, from index `first` on."""
    return _in(like[0], _drawn(rank, _places(first, number, like)))


def reduce_input(rank: int, ranks: Sequence[int], number: int, like: Like) -> Tensor:
    """Return the (number,) tensor that `rank` contributes to a reduction: its pattern at every
    len(ranks)-th position, zeros elsewhere.

    It adds a one everywhere, unless the dtype cannot hold the sum of the ones exactly.
    """
    is_own = _places(0, number, like) % len(ranks) == ranks.index(rank)
    return rank_pattern(rank, number, like) * is_own + _ones(len(ranks), like[0])


def expected_sum(ranks: Sequence[int], number: int, like: Like, first: int = 0) -> Tensor:
    """Return the sum of these ranks' summands, from position `first` on."""
    return expected_max(ranks, number, like, first) + (len(ranks) - 1) * _ones(len(ranks), like[0])


def expected_max(ranks: Sequence[int], number: int, like: Like, first: int = 0) -> Tensor:
    """Return the elementwise maximum of the contributions of all `ranks`."""
    places = _places(first, number, like)
    owners = torch.tensor(ranks, device=like[1])[places % len(ranks)]
    return _in(like[0], _drawn(owners, places)) + _ones(len(ranks), like[0])


def compare(result: Tensor, expected: Tensor) -> str:
    """Return which element is wrong, with both values, or ""."""
    if result.shape != expected.shape or result.dtype != expected.dtype:
        shown = [f"{dtype_name(x.dtype)}{list(x.shape)}" for x in (result, expected)]
        return f"got {shown[0]}, expected {shown[1]}"
    different = (result != expected).flatten()
    if not bool(different.any()):
        return ""
    at = int(different.int().argmax())
    values = [x.flatten()[at].item() for x in (result, expected)]
    one, other = (str(v) if isinstance(v, complex) else f"{v:g}" for v in values)
    return (
        f"got {one} at element {at}, expected {other} "
        f"({int(different.sum())} of {result.numel()} elements differ)"
    )


def _drawn(ranks: int | Tensor, places: Tensor) -> Tensor:
    # of the square of a place, as a shift by any number of places must not be one of the values
    lot = (places + 1) ** 2 % _MODULUS * (_BY_PLACE + ranks // LARGEST) % _MODULUS
    return (lot + ranks * _BY_RANK) % LARGEST + 1


def _ones(num_ranks: int, dtype: torch.dtype) -> int:
    """Return what a rank puts into elements of other ranks: 1, or 0 if sums would be inexact."""
    return int(num_ranks + LARGEST <= _EXACT_TO.get(dtype, 2**24))


def _in(dtype: torch.dtype, numbers: Tensor) -> Tensor:
    return (numbers * (1 - 2j) if dtype.is_complex else numbers).to(dtype)


def _places(first: int, number: int, like: Like) -> Tensor:
    return torch.arange(first, first + number, device=like[1])


def make_input(
    operation: str, ranks: Sequence[int], index: int, num_elements: int, like: Like
) -> Tensor:
    """Return the input of the rank at `index` of `ranks`; `num_elements` are those counted."""
    spec = COLLECTIVES[operation]
    if spec.is_sum:
        return reduce_input(ranks[index], ranks, num_elements, like)
    return rank_pattern(ranks[index], spec.input_bytes(num_elements, len(ranks)), like)


def expected(
    operation: str, ranks: Sequence[int], index: int, num_elements: int, like: Like
) -> Tensor | None:
    """Return the result that the rank must have afterwards; None if it receives nothing."""
    spec, size = COLLECTIVES[operation], len(ranks)
    if spec.is_message:
        only_sends = operation == "p2p" and index == 0
        return None if only_sends else rank_pattern(ranks[1 - index], num_elements, like)
    part = num_elements // size
    if spec.is_sum:
        first = index * part if spec.output_is_part else 0
        return expected_sum(ranks, spec.output_bytes(num_elements, size), like, first)
    if not spec.in_parts:
        return rank_pattern(ranks[0], num_elements, like)
    first = 0 if spec.input_is_part else index * part
    return torch.cat([rank_pattern(sender, part, like, first) for sender in ranks])


def tdp_call(operation: str, x: Tensor, member: GroupMember) -> Call:
    """Return a call of our public function."""
    group = member.group
    if not COLLECTIVES[operation].is_message:
        function = COLLECTIVES[operation].load(COLLECTIVES[operation].call)
        return lambda: function(x, group)
    room, peer = torch.zeros_like(x), member.peer
    if operation == "p2p":
        receive = partial(p2p.receive, room, group, peer)
        return receive if member.index else partial(p2p.send, x, group, peer)

    def both() -> Tensor:
        post = p2p.Post(group)
        post.receive([room], peer)
        post.send([x], peer)
        # a bare call of torch, which it is measured against, waits too
        post.go().wait()
        return room

    return both


def torch_call(operation: str, x: Tensor, member: GroupMember) -> Call:
    """Return the same call of torch.distributed."""
    group = member.group
    if not COLLECTIVES[operation].is_message:
        function = COLLECTIVES[operation].load(COLLECTIVES[operation].torch)
        return lambda: function(x, group)
    room, peer = torch.zeros_like(x), member.peer

    def receive() -> Tensor:
        dist.recv(room, peer, group=group)
        return room

    def both() -> Tensor:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, room, peer, group), dist.P2POp(dist.isend, x, peer, group)]
        )
        # the buffer must be full before it is returned, as with our call
        for work in works:
            work.wait()
        return room

    if operation == "p2p_both":
        return both
    return receive if member.index else lambda: dist.send(x, peer, group=group)


def sync(operation: str, member: GroupMember) -> Call:
    """Return a call after which the ranks of `member` are in step, also on the device's queue."""
    x = torch.zeros(1, device=primitives.device_of(member.group))
    if not COLLECTIVES[operation].is_message:
        return partial(by_torch.all_reduce, x, member.group)

    def there_and_back() -> None:
        turns = (dist.recv, dist.send) if member.index else (dist.send, dist.recv)
        for turn in turns:
            turn(x, member.peer, group=member.group)

    return there_and_back


def sync_all() -> Call:
    """Return such a call for all ranks of the default group, whichever groups they belong to."""
    world = tpc.get_group("global")
    if not primitives.is_queued(world):
        return partial(primitives.barrier, world)  # in log2 of the ranks; a sum goes round all
    return partial(by_torch.all_reduce, torch.zeros(1, device=primitives.device_of(world)), world)
