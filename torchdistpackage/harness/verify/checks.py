"""Each operation with data that says who sent it, and what must therefore arrive.

One rule: the expected numbers follow from the global ranks alone and are exact, so a wrong rank, a
wrong order and a wrong place each show, element by element. Only an average is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdistpackage.comm import p2p, primitives
from torchdistpackage.comm.flight_recorder import dtype_name
from torchdistpackage.comm.primitives import Group
from torchdistpackage.harness.coded import (
    Like,
    expected_max,
    expected_sum,
    rank_pattern,
    reduce_input,
)

NUM_ELEMENTS = 1000
NUM_ROWS = 40
LARGE_ELEMENTS = p2p.SMALL_BYTES // 8 + 1
"""Of 8 bytes, so that the receives of a batch are posted first."""

_SUMMED = (torch.float32, torch.int64, torch.bfloat16)
_MOVED = (torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.complex64, torch.uint8)


@dataclass(frozen=True, slots=True)
class GroupMember:
    """One rank's part in a group. ranks: of the group, global. index: mine among them."""

    group: Group
    ranks: tuple[int, ...]
    rank: int

    @property
    def index(self) -> int:
        return self.ranks.index(self.rank)


Found = Iterator[tuple[Tensor, Tensor, str]]
"""(what arrived, what must have, from whom or "")"""


@dataclass(frozen=True, slots=True)
class Check:
    """One operation. name: for people, e.g. `all_reduce sum of float32`."""

    name: str
    run: Callable[[GroupMember], Found]


def collectives() -> list[Check]:
    """What is checked over each group."""
    return [
        *(Check(f"all_reduce sum of {dtype_name(t)}", _typed(_sum, t)) for t in _SUMMED),
        Check("all_reduce max of float64", _typed(_max, torch.float64)),
        Check("all_reduce average of float32", _typed(_average, torch.float32)),
        Check("all_gather of bfloat16", _typed(_all_gather, torch.bfloat16)),
        Check("all_gather of uneven int64", _typed(_all_gather_uneven, torch.int64)),
        Check("reduce_scatter of float32", _typed(_reduce_scatter, torch.float32)),
        Check("reduce_scatter of uneven int64", _typed(_reduce_scatter_uneven, torch.int64)),
        Check("all_to_all of float64", _typed(_all_to_all, torch.float64)),
        Check("all_to_all of uneven uint8", _typed(_all_to_all_uneven, torch.uint8)),
        Check("broadcast from every rank", _broadcast),
        Check("barrier", _barrier),
        Check("gather_objects", _gather_objects),
        Check("broadcast_object", _broadcast_object),
    ]


def neighbours() -> list[Check]:
    """What is checked along the pipe axis, the last stage being the first one's neighbour."""
    return [
        Check("message to the next stage", _message(1, 0)),
        Check("message to the previous stage", _message(0, 1)),
        Check("messages both ways", _message(1, 1)),
        Check("large messages both ways", _message(1, 1, LARGE_ELEMENTS)),
    ]


def pair(first: int, second: int) -> Check:
    """Messages both ways between two global ranks of a larger group."""

    def run(seat: GroupMember) -> Found:
        peer = second if seat.rank == first else first
        yield from _exchange(seat, [(peer, peer)], NUM_ELEMENTS)

    return Check("messages both ways", run)


def _sum(seat: GroupMember, dtype: torch.dtype) -> Found:
    like = dtype, primitives.device_of(seat.group)
    mine = reduce_input(seat.rank, seat.ranks, NUM_ELEMENTS, like)
    yield primitives.all_reduce(mine, seat.group), expected_sum(seat.ranks, NUM_ELEMENTS, like), ""


def _max(seat: GroupMember, dtype: torch.dtype) -> Found:
    like = dtype, primitives.device_of(seat.group)
    mine = reduce_input(seat.rank, seat.ranks, NUM_ELEMENTS, like)
    got = primitives.all_reduce(mine, seat.group, primitives.MAX)
    yield got, expected_max(seat.ranks, NUM_ELEMENTS, like), ""


def _average(seat: GroupMember, dtype: torch.dtype) -> Found:
    like = dtype, primitives.device_of(seat.group)
    mean = expected_sum(seat.ranks, NUM_ELEMENTS, like) / len(seat.ranks)
    mine = reduce_input(seat.rank, seat.ranks, NUM_ELEMENTS, like)
    got = primitives.all_reduce(mine, seat.group, primitives.AVG)
    # back ends divide before or after they add, so the last bits are theirs
    near = (got - mean).abs() <= len(seat.ranks) * torch.finfo(dtype).eps * mean
    yield torch.where(near, mean, got), mean, ""


def _all_gather(seat: GroupMember, dtype: torch.dtype) -> Found:
    like = dtype, primitives.device_of(seat.group)
    got = primitives.all_gather(_rows(seat.rank, NUM_ROWS, like), seat.group)
    yield got, torch.cat([_rows(rank, NUM_ROWS, like) for rank in seat.ranks]), ""


def _all_gather_uneven(seat: GroupMember, dtype: torch.dtype) -> Found:
    like, sizes = (dtype, primitives.device_of(seat.group)), _uneven(len(seat.ranks))
    parts = [_rows(rank, n, like) for rank, n in zip(seat.ranks, sizes, strict=True)]
    yield primitives.all_gather(parts[seat.index], seat.group, sizes), torch.cat(parts), ""


def _reduce_scatter(seat: GroupMember, dtype: torch.dtype) -> Found:
    like, number = (dtype, primitives.device_of(seat.group)), NUM_ROWS * len(seat.ranks)
    mine = reduce_input(seat.rank, seat.ranks, number, like)
    got = primitives.reduce_scatter(mine, seat.group)
    yield got, expected_sum(seat.ranks, number, like).view(-1, NUM_ROWS)[seat.index], ""


def _reduce_scatter_uneven(seat: GroupMember, dtype: torch.dtype) -> Found:
    like, sizes = (dtype, primitives.device_of(seat.group)), _uneven(len(seat.ranks))
    mine = reduce_input(seat.rank, seat.ranks, sum(sizes), like)
    expected = expected_sum(seat.ranks, sum(sizes), like).split(sizes)[seat.index]
    yield primitives.reduce_scatter(mine, seat.group, sizes), expected, ""


def _all_to_all(seat: GroupMember, dtype: torch.dtype) -> Found:
    like, size = (dtype, primitives.device_of(seat.group)), len(seat.ranks)
    got = primitives.all_to_all(rank_pattern(seat.rank, NUM_ROWS * size, like), seat.group)
    sent = [rank_pattern(rank, NUM_ROWS * size, like).view(size, -1) for rank in seat.ranks]
    yield got, torch.cat([parts[seat.index] for parts in sent]), ""


def _all_to_all_uneven(seat: GroupMember, dtype: torch.dtype) -> Found:
    """Rank i sends to rank j as many rows as i + j is given."""
    like, size = (dtype, primitives.device_of(seat.group)), len(seat.ranks)
    table = [[(3 * i + 5 * j) % 7 for j in range(size)] for i in range(size)]
    mine, received = table[seat.index], [row[seat.index] for row in table]
    x = rank_pattern(seat.rank, sum(mine), like)
    got = primitives.all_to_all(x, seat.group, mine, received)
    parts = [
        rank_pattern(rank, sum(row), like).split(row)[seat.index]
        for rank, row in zip(seat.ranks, table, strict=True)
    ]
    yield got, torch.cat(parts), ""


def _broadcast(seat: GroupMember) -> Found:
    for turn, source in enumerate(seat.ranks):
        like = _MOVED[turn % len(_MOVED)], primitives.device_of(seat.group)
        x = rank_pattern(seat.rank, NUM_ELEMENTS, like)
        expected = rank_pattern(source, NUM_ELEMENTS, like)
        yield primitives.broadcast(x, seat.group, source), expected, f" from rank {source}"


def _barrier(seat: GroupMember) -> Found:
    primitives.barrier(seat.group)
    yield from ()


def _gather_objects(seat: GroupMember) -> Found:
    """Texts of different lengths, each with its rank."""
    mine = {"rank": seat.rank, "text": "x" * (seat.rank % 5)}
    got = primitives.gather_objects(mine, seat.group)
    ranks = [
        o["rank"] if isinstance(o, dict) and len(o["text"]) == o["rank"] % 5 else -1 for o in got
    ]
    yield torch.tensor(ranks), torch.tensor(seat.ranks), ""


def _broadcast_object(seat: GroupMember) -> Found:
    source = seat.ranks[-1]
    got = primitives.broadcast_object({"rank": seat.rank}, seat.group, source)
    rank = got["rank"] if isinstance(got, dict) else -1
    yield torch.tensor([rank]), torch.tensor([source]), f" from rank {source}"


def _message(
    forward: int, backward: int, number: int = NUM_ELEMENTS
) -> Callable[[GroupMember], Found]:
    def run(seat: GroupMember) -> Found:
        ranks, index = seat.ranks, seat.index
        before, after = ranks[index - 1], ranks[(index + 1) % len(ranks)]
        yield from _exchange(
            seat, [(before, after)] * forward + [(after, before)] * backward, number
        )

    return run


def _exchange(seat: GroupMember, ways: list[tuple[int, int]], number: int) -> Found:
    """Of each (source, target) a message in, and one out, all posted together."""
    like = torch.int64, primitives.device_of(seat.group)
    post = p2p.Post(seat.group)
    rooms = [torch.zeros(number, dtype=like[0], device=like[1]) for _ in ways]
    for way, (room, (source, target)) in enumerate(zip(rooms, ways, strict=True)):
        post.receive([room], source)
        post.send([rank_pattern(seat.rank, number, like) + 256 * way], target)
    post.go().wait()
    for way, (room, (source, _)) in enumerate(zip(rooms, ways, strict=True)):
        yield room, rank_pattern(source, number, like) + 256 * way, f" from rank {source}"


def _typed(
    run: Callable[[GroupMember, torch.dtype], Found], dtype: torch.dtype
) -> Callable[[GroupMember], Found]:
    return lambda seat: run(seat, dtype)


def _rows(rank: int, number: int, like: Like) -> Tensor:
    """(number, 3)"""
    return rank_pattern(rank, 3 * number, like).view(number, 3)


def _uneven(size: int) -> list[int]:
    """Rows of each rank; some have none."""
    return [(5 * index + 1) % 4 * 7 for index in range(size)]
