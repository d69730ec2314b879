"""Each operation of harness/operations.py as a call: ours, and the bare one that it is compared
with.

One rule: both do the same on tensors that are made beforehand, so what differs between their times
is our own work. A unit is the ranks that take part; of two neighbours the first one sends. Rooms
start as zeros, which nobody sends (harness/coded.py): what was there before does not pass for it.
What is sent are the coded numbers of the positions in the unit, so what must arrive follows from
the unit's size alone and is exact in every element type.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.comm import p2p, primitives
from torchdistpackage.comm.primitives import Group
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.harness import raw_torch
from torchdistpackage.harness.coded import Like, expected_sum, rank_pattern, reduce_input
from torchdistpackage.harness.operations import COLLECTIVES

MESSAGES = ("p2p", "p2p_both")
SUMMED = ("all_reduce", "reduce_scatter")
Call = Callable[[], Tensor | None]
"""Returns what arrived, or None on a rank that only sends."""


@dataclass(frozen=True, slots=True)
class UnitRank:
    """One rank's part in a unit. group: that of the whole unit, or one that its two ranks are in.

    unit: global ranks. index: mine in it.
    """

    unit: tuple[int, ...]
    index: int
    group: Group

    @property
    def peer(self) -> int:
        """The other one of two."""
        return self.unit[1 - self.index]


def make_input(operation: str, index: int, size: int, num_elements: int, like: Like) -> Tensor:
    """What position `index` of a unit of `size` ranks gives; `num_elements` are those counted."""
    if operation in SUMMED:
        return reduce_input(index, range(size), num_elements, like)
    return rank_pattern(index, COLLECTIVES[operation].input_bytes(num_elements, size), like)


def expected(operation: str, index: int, size: int, num_elements: int, like: Like) -> Tensor | None:
    """What position `index` must have afterwards; None where it receives nothing."""
    if operation == "p2p":
        return rank_pattern(0, num_elements, like) if index == 1 else None
    if operation == "p2p_both":
        return rank_pattern(1 - index, num_elements, like)
    if operation == "broadcast":
        return rank_pattern(0, num_elements, like)
    if operation == "all_reduce":
        return expected_sum(range(size), num_elements, like)
    part = num_elements // size
    if operation == "reduce_scatter":
        return expected_sum(range(size), part, like, first=index * part)
    first = index * part if operation == "all_to_all" else 0
    return torch.cat([rank_pattern(sender, part, like, first) for sender in range(size)])


def tdp_call(operation: str, x: Tensor, place: UnitRank) -> Call:
    """A call of what comm offers."""
    group = place.group
    if operation == "p2p":
        return _message(p2p.send, p2p.receive, x, place)
    if operation == "p2p_both":
        room = torch.zeros_like(x)

        def both() -> Tensor:
            post = p2p.Post(group)
            post.receive([room], place.peer)
            post.send([x], place.peer)
            post.go().wait()
            return room

        return both
    function = getattr(primitives, operation)
    return lambda: function(x, group)


def torch_call(operation: str, x: Tensor, place: UnitRank) -> Call:
    """The same call of torch.distributed."""
    group = place.group
    if operation == "p2p":
        return _message(raw_torch.send, raw_torch.receive, x, place)
    if operation == "p2p_both":
        room = torch.zeros_like(x)
        return lambda: raw_torch.send_and_receive(x, room, group, place.peer)
    function = raw_torch.COLLECTIVES[operation]
    return lambda: function(x, group)


def sync(operation: str, place: UnitRank) -> Call:
    """A call after which the ranks of the unit are together, in the order of the device too."""
    x = torch.zeros(1, device=primitives.device_of(place.group))
    if operation not in MESSAGES:
        return lambda: raw_torch.all_reduce(x, place.group)

    def there_and_back() -> None:
        turns = [raw_torch.send, raw_torch.receive]
        if place.index:
            turns.reverse()
        for turn in turns:
            turn(x, place.group, place.peer)

    return there_and_back


def sync_all() -> Call:
    """The same for all ranks of the default group, whatever they take part in."""
    whole = tpc.get_group("global")
    if not primitives.is_queued(whole):
        return lambda: primitives.barrier(whole)  # in log2 of the ranks; a sum goes round all
    x = torch.zeros(1, device=primitives.device_of(whole))
    return lambda: raw_torch.all_reduce(x, whole)


def _message(
    send: Callable[[Tensor, Group, int], object],
    receive: Callable[[Tensor, Group, int], Tensor],
    x: Tensor,
    place: UnitRank,
) -> Call:
    if place.index == 0:

        def give() -> None:
            send(x, place.group, place.peer)

        return give
    room = torch.zeros_like(x)
    return lambda: receive(room, place.group, place.peer)
