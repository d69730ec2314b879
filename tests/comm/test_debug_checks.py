"""Debug mode: whoever differs is told on both sides, and nobody waits for ever."""

import pytest
import torch
import torch.distributed as dist

from tests.tells import tells
from torchdistpackage.comm import debug_checks
from torchdistpackage.comm import primitives as p
from torchdistpackage.comm.debug_checks import checked_calls
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.p2p import Post, receive, send, start_receive, start_send
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError

ROWS = torch.ones(3, 2)
TAGS = debug_checks._SENDS, debug_checks._RECEIVES

DIFFERENT = {
    "shape": lambda g, odd: p.all_reduce(torch.ones(3, 3) if odd else ROWS, g),
    "dtype": lambda g, odd: p.all_reduce(ROWS.double() if odd else ROWS, g),
    "reduction": lambda g, odd: p.all_reduce(ROWS, g, p.MAX if odd else p.SUM),
    "operation": lambda g, odd: p.broadcast(ROWS, g) if odd else p.all_reduce(ROWS, g),
    "source": lambda g, odd: p.broadcast(ROWS, g, p.ranks_of(g)[int(odd)]),
    "begun": lambda g, odd: p.all_gather(ROWS.int() if odd else ROWS, g, None, True).wait(),
    "barrier": lambda g, odd: p.barrier(g) if odd else p.all_reduce(ROWS, g),
}
SAYS = {
    "shape": (r"float32\[3, 3\]", r"float32\[3, 2\]"),
    "dtype": (r"float64\[3, 2\]", r"float32\[3, 2\]"),
    "reduction": ("MAX", "SUM"),
    "operation": (r"broadcast of float32\[3, 2\]", "all_reduce of"),
    "source": ("2", "0"),
    "begun": ("all_gather of int32", "all_gather of float32"),
    "barrier": ("barrier", "all_reduce"),
}


def differs(case: str) -> list[str]:
    """data 2 x tensor 2: the data group {0, 2} differs, {1, 3} does not."""
    tpc.setup_process_groups([("data", 2), ("tensor", 2)])
    group, rank = tpc.get_group("data"), dist.get_rank()
    said = []
    with checked_calls():
        p.all_reduce(torch.ones(1), group)
        try:
            DIFFERENT[case](group, rank == 2)
        except CommError as error:
            said.append(str(error))
        # the group is still in step: nothing was sent that nobody took
        assert p.all_reduce(torch.ones(1), dist.group.WORLD).item() == 4
    return said


@pytest.mark.parametrize("case", SAYS)
def test_a_difference_is_told_to_both_sides(ranks, case):
    first, none, second, nobody = ranks(4).run(differs, case)
    assert none == nobody == []
    assert first == second and len(first) == 1
    odd, others = SAYS[case]
    assert tells(first[0], "number 2", "ranks (0, 2)")
    with pytest.raises(CommError, match=f"(?s)rank 0: .*{others}.*; rank 2: .*{odd}"):
        raise CommError(first[0])


def uneven() -> list[str]:
    """The rows may differ where sizes say so; what one sends must be what the other expects."""
    rank, world = dist.get_rank(), dist.group.WORLD
    said = []
    with checked_calls():
        assert len(p.all_gather(torch.ones(rank, 2), world, [0, 1])) == 1
        assert len(p.all_to_all(torch.ones(3), world, [1, 2], [rank + 1, rank + 1])) == 2 * rank + 2
        with pytest.raises(CommError) as caught:
            p.all_to_all(torch.ones(3), world, [1, 2], [1, 1])
        said.append(str(caught.value))
        with pytest.raises(CommError) as caught:
            p.all_gather(torch.ones(3, 2 + rank), world, [3, 3])
        said.append(str(caught.value))
    return said


def test_uneven_rows_are_compared_pair_by_pair(ranks):
    first, second = ranks(2).run(uneven)
    assert first == second
    assert tells(first[0], "rank 0", "2 rows", "rank 1", "expects 1")
    assert "float32[rows, 2]" in first[1] and "float32[rows, 3]" in first[1]


def messages() -> list[str]:
    rank, world = dist.get_rank(), dist.group.WORLD
    said = []
    with checked_calls():
        good = Post(world)
        good.send([torch.ones(2)], 1 - rank)
        good.receive([room := torch.zeros(2)], 1 - rank)
        good.go().wait()
        assert room.sum() == 2
        shape, dtype = ((3, 2), torch.bfloat16) if rank else ((2, 3), torch.float16)
        for mine in (torch.ones(shape), torch.ones(2, dtype=dtype)):
            with pytest.raises(CommError) as caught:
                (receive if rank else send)(mine, world, 1 - rank)
            said.append(str(caught.value))
    return said


def both_ways_and_round() -> None:
    """Right programs pass: another shape each way, and a ring of messages that are begun."""
    rank, world = dist.get_rank(), dist.group.WORLD
    with checked_calls():
        if rank < 2:
            post, room = Post(world), torch.zeros(2 + rank)
            post.send([torch.ones(3 - rank)], 1 - rank)
            post.receive([room], 1 - rank)
            post.go().wait()
            assert room.sum() == 2 + rank
        sent = start_send(torch.full((2,), float(rank)), world, (rank + 1) % 3)
        got = start_receive(torch.empty(2), world, (rank - 1) % 3)
        sent.wait()
        assert got.wait().tolist() == [(rank - 1) % 3] * 2


def test_right_messages_pass(ranks):
    ranks(3).run(both_ways_and_round)


def without_tags(case: str) -> str:
    """As on NCCL, which takes a message for the next one of its pair, whatever the tag."""
    rank = dist.get_rank()
    group = Groups(rank).of((0, 1), use="tags")
    peer = 1 - rank
    debug_checks._SENDS = debug_checks._RECEIVES = 0
    try:
        with checked_calls():
            post = Post(group)
            if case == "both ways":  # each rank lists what it sends first
                post.send([torch.ones(5 if rank else 3)], peer)
                post.receive([torch.empty(3 if rank else 5)], peer)
            else:
                post.send([torch.ones(3)], peer)
            post.go().wait()
    except CommError as error:
        return str(error)
    finally:
        debug_checks._SENDS, debug_checks._RECEIVES = TAGS
    return "fits"


def test_what_two_ranks_say_of_messages_is_not_mixed_up_where_tags_are_ignored(ranks):
    assert ranks(2).run(without_tags, "both ways") == ["fits", "fits"]


def test_two_ranks_that_both_send_are_told_so(ranks):
    first, second = ranks(2).run(without_tags, "both send")
    assert "rank 0 is about to send float32[3], rank 1 to send float32[3]" in first
    assert "rank 1 is about to send float32[3], rank 0 to send float32[3]" in second


def nobody_comes() -> list[str]:
    rank, said = dist.get_rank(), []
    if rank == 2:
        return said
    group = Groups(rank).of([0, 1])  # whose connections its limit closes
    p.set_timeout(group, 0.5)
    with checked_calls():
        calls = (lambda: p.all_reduce(ROWS, group), lambda: send(ROWS, group, 1))
        for call in calls if rank == 0 else ():
            with pytest.raises(CommError) as caught:
                call()
            said.append(str(caught.value))
    return said


@pytest.mark.late_in_full
def test_a_rank_that_does_not_come_to_the_comparison_is_said_to_be_missing(ranks):
    collective, message = ranks(3).run(nobody_comes)[0]
    assert "all_reduce of float32[3, 2]" in collective and "did not make the call" in collective
    assert tells(message, "rank 0", "ranks [1]")


def test_a_message_that_does_not_fit_is_told_to_both_sides(ranks):
    sender, receiver = ranks(2).run(messages)
    assert "rank 0 is about to send float32[2, 3], rank 1 to receive float32[3, 2]" in sender[0]
    assert "rank 1 is about to receive float32[3, 2], rank 0 to send float32[2, 3]" in receiver[0]
    assert "float16[2]" in sender[1] and "bfloat16[2]" in sender[1]
