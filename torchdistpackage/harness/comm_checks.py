"""Check operations over a group with data that shows its sender, against what must arrive.

The expected numbers follow from the global ranks alone and are exact, so a wrong rank, a wrong
order and a wrong place each show, element by element. Only an average is rounded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchdistpackage.comm import p2p, primitives
from torchdistpackage.comm.collective_table import COLLECTIVES
from torchdistpackage.harness.calls import (
    GroupMember,
    Like,
    expected,
    expected_max,
    expected_sum,
    make_input,
    rank_pattern,
    reduce_input,
    tdp_call,
)

NUM_ELEMENTS = 1000
NUM_ROWS = 40
LARGE_ELEMENTS = p2p.SMALL_BYTES // 8 + 1
"""Number of elements (8 bytes each) from which the receives of a batch are posted first."""

_MOVED = (torch.float32, torch.bfloat16, torch.int64, torch.float16, torch.complex64, torch.uint8)

Found = Iterator[tuple[Tensor, Tensor, str]]
"""(received value, expected value, sender or "")."""


@dataclass(frozen=True, slots=True)
class Check:
    """One operation; `name` is for people, e.g. `all_gather of bfloat16`."""

    name: str
    run: Callable[[GroupMember], Found]


def collectives() -> list[Check]:
    """Return the checks over each group: each row of COLLECTIVES, and cases that it does not
    cover.
    """
    return [
        *(
            Check(f"{name} of {dtype}", partial(_row, name, getattr(torch, dtype)))
            for name, spec in COLLECTIVES.items()
            for dtype in spec.tested
        ),
        Check("all_reduce max of float64", _max),
        Check("all_reduce average of float32", _average),
        Check("all_gather of uneven int64", _all_gather_uneven),
        Check("reduce_scatter of uneven int64", _reduce_scatter_uneven),
        Check("all_to_all of uneven uint8", _all_to_all_uneven),
        Check("broadcast from every rank", _broadcast),
        Check("barrier", _barrier),
        Check("gather_objects", _gather_objects),
        Check("broadcast_object", _broadcast_object),
    ]


def neighbours() -> list[Check]:
    """Return the checks along the pipe axis, where the last stage is a neighbour of the first."""
    return [
        Check("message to the next stage", partial(_message, 1, 0, NUM_ELEMENTS)),
        Check("message to the previous stage", partial(_message, 0, 1, NUM_ELEMENTS)),
        Check("messages both ways", partial(_message, 1, 1, NUM_ELEMENTS)),
        Check("large messages both ways", partial(_message, 1, 1, LARGE_ELEMENTS)),
    ]


def pair() -> Check:
    """Return the check of messages both ways between two ranks."""
    return Check(
        "messages both ways",
        lambda member: _exchange(member, [(member.peer, member.peer)], NUM_ELEMENTS),
    )


def _row(operation: str, dtype: torch.dtype, member: GroupMember) -> Found:
    key = operation, member.ranks, member.index, NUM_ROWS * len(member.ranks), member.like(dtype)
    result, expected_result = tdp_call(operation, make_input(*key), member)(), expected(*key)
    assert result is not None and expected_result is not None
    yield result, expected_result, ""


def _max(member: GroupMember) -> Found:
    like = member.like(torch.float64)
    sent = reduce_input(member.rank, member.ranks, NUM_ELEMENTS, like)
    result = primitives.all_reduce(sent, member.group, primitives.MAX)
    yield result, expected_max(member.ranks, NUM_ELEMENTS, like), ""


def _average(member: GroupMember) -> Found:
    like, size = member.like(torch.float32), len(member.ranks)
    mean = expected_sum(member.ranks, NUM_ELEMENTS, like) / size
    sent = reduce_input(member.rank, member.ranks, NUM_ELEMENTS, like)
    result = primitives.all_reduce(sent, member.group, primitives.AVG)
    # back ends divide before or after they add, so the last bits are theirs
    near = (result - mean).abs() <= size * torch.finfo(like[0]).eps * mean
    yield torch.where(near, mean, result), mean, ""


def _all_gather_uneven(member: GroupMember) -> Found:
    like, sizes = member.like(torch.int64), _uneven(len(member.ranks))
    parts = [
        rank_pattern(rank, 3 * n, like).view(n, 3)
        for rank, n in zip(member.ranks, sizes, strict=True)
    ]
    result = primitives.all_gather(parts[member.index], member.group, sizes)
    yield result, torch.cat(parts), ""


def _reduce_scatter_uneven(member: GroupMember) -> Found:
    like, sizes = member.like(torch.int64), _uneven(len(member.ranks))
    sent = reduce_input(member.rank, member.ranks, sum(sizes), like)
    expected_slice = expected_sum(member.ranks, sum(sizes), like).split(sizes)[member.index]
    yield primitives.reduce_scatter(sent, member.group, sizes), expected_slice, ""


def _all_to_all_uneven(member: GroupMember) -> Found:
    """Check an uneven all-to-all: rank i sends i + j rows to rank j."""
    like, size, index = member.like(torch.uint8), len(member.ranks), member.index
    table = [[(3 * i + 5 * j) % 7 for j in range(size)] for i in range(size)]
    sent_sizes, received = table[index], [row[index] for row in table]
    x = rank_pattern(member.rank, sum(sent_sizes), like)
    result = primitives.all_to_all(x, member.group, sent_sizes, received)
    parts = [
        rank_pattern(rank, row[index], like, first=sum(row[:index]))
        for rank, row in zip(member.ranks, table, strict=True)
    ]
    yield result, torch.cat(parts), ""


def _broadcast(member: GroupMember) -> Found:
    for turn, source in enumerate(member.ranks):
        like = member.like(_MOVED[turn % len(_MOVED)])
        x = rank_pattern(member.rank, NUM_ELEMENTS, like)
        expected_tensor = rank_pattern(source, NUM_ELEMENTS, like)
        yield primitives.broadcast(x, member.group, source), expected_tensor, f" from rank {source}"


def _barrier(member: GroupMember) -> Found:
    primitives.barrier(member.group)
    yield from ()


def _gather_objects(member: GroupMember) -> Found:
    """Gather texts of different lengths, each with its rank."""
    sent = {"rank": member.rank, "text": "x" * (member.rank % 5)}
    objects = primitives.gather_objects(sent, member.group)
    ranks = [
        o["rank"] if isinstance(o, dict) and len(o["text"]) == o["rank"] % 5 else -1
        for o in objects
    ]
    yield torch.tensor(ranks), torch.tensor(member.ranks), ""


def _broadcast_object(member: GroupMember) -> Found:
    source = member.ranks[-1]
    answer = primitives.broadcast_object({"rank": member.rank}, member.group, source)
    rank = answer["rank"] if isinstance(answer, dict) else -1
    yield torch.tensor([rank]), torch.tensor([source]), f" from rank {source}"


def _message(forward: int, backward: int, number: int, member: GroupMember) -> Found:
    ranks, index = member.ranks, member.index
    previous_rank, next_rank = ranks[index - 1], ranks[(index + 1) % len(ranks)]
    ways = [(previous_rank, next_rank)] * forward + [(next_rank, previous_rank)] * backward
    yield from _exchange(member, ways, number)


def _exchange(member: GroupMember, ways: list[tuple[int, int]], number: int) -> Found:
    """Exchange one message for each (source, target) pair, all posted together, and yield what was
    received.
    """
    like: Like = member.like(torch.int64)
    post = p2p.Post(member.group)
    rooms = [torch.zeros(number, dtype=like[0], device=like[1]) for _ in ways]
    for direction, (room, (source, target)) in enumerate(zip(rooms, ways, strict=True)):
        post.receive([room], source)
        post.send([rank_pattern(member.rank, number, like) + 256 * direction], target)
    # what has arrived is compared next
    post.go().wait()
    for direction, (room, (source, _)) in enumerate(zip(rooms, ways, strict=True)):
        yield room, rank_pattern(source, number, like) + 256 * direction, f" from rank {source}"


def _uneven(size: int) -> list[int]:
    """Return the number of rows of each rank; some ranks have none."""
    return [(5 * index + 1) % 4 * 7 for index in range(size)]
