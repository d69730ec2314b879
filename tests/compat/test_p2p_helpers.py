"""The earlier package's messages by hand: right at any depth, for any number of tensors."""

import pytest
import torch
import torch.distributed as dist
from torchdistpackage.parallel.pipeline_parallel.comm import (
    gather_split_1d_tensor,
    recv_backward,
    recv_forward,
    recv_obj_meta,
    send_backward,
    send_backward_recv_backward,
    send_backward_recv_forward,
    send_forward,
    send_forward_backward_recv_forward_backward,
    send_forward_recv_backward,
    send_forward_recv_forward,
    send_obj_meta,
    split_tensor_into_1d_equal_chunks,
)

from tests.parallel.pipeline.whole_model import batch, chain, same_gradients, squares
from tests.tells import facts_pattern
from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import CommError, LayoutError


def one_f_one_b_by_hand(num_microbatches: int) -> None:
    """The earlier scheduler's own loop: warm-up, steady state, cool-down; metadata once."""
    rank, p = dist.get_rank(), dist.get_world_size()
    tpc.setup_process_groups([("pipe", p)])
    x, y = batch(2 * num_microbatches)
    xs, ys = x.split(2), y.split(2)
    truth, stage = chain(p), chain(p)[rank]
    squares(truth(x), y).backward()
    need_meta, shape, queue = True, None, []
    warmup = min(p - rank - 1, num_microbatches)

    def forward(m, received):
        nonlocal need_meta
        received = xs[m] if rank == 0 else received
        output = stage(received)
        if rank == p - 1:
            output = squares(output, ys[m]) / num_microbatches
        need_meta = send_obj_meta(output, need_meta)
        queue.append((received, output))
        return output

    def backward(gradient):
        received, output = queue.pop(0)
        torch.autograd.backward(output, gradient)
        return received.grad

    m, given = 0, None
    for _ in range(warmup):
        shape = recv_obj_meta(shape)
        send_forward(forward(m, recv_forward(shape)))
        m += 1
    steady = num_microbatches - warmup
    if steady:
        shape = recv_obj_meta(shape)
        given = recv_forward(shape)
    for i in range(steady):
        output = forward(m, given)
        m += 1
        gradient = send_forward_recv_backward(output, output.shape)
        if i < steady - 1:
            given = send_backward_recv_forward(backward(gradient), shape)
        else:
            send_backward(backward(gradient))
    for _ in range(warmup):
        send_backward(backward(recv_backward(queue[0][1].shape)))
    same_gradients({rank: stage}, truth)


@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("depth", [3, pytest.param(4, marks=pytest.mark.full)])
def test_the_earlier_loop_trains_as_one_process(ranks, depth, num_microbatches):
    ranks(depth).run(one_f_one_b_by_hand, num_microbatches, timeout_s=60)


def everything() -> list:
    return [
        torch.arange(6.0).reshape(2, 3).requires_grad_(),
        torch.arange(4),
        torch.tensor([True, False]),
        None,
        torch.arange(6, dtype=torch.float64).reshape(3, 2).t(),  # not contiguous
        torch.ones(2, dtype=torch.bfloat16),
    ]


def many_members() -> None:
    """Through three stages; gradients come back for floats, as zeros where there is none."""
    rank = dist.get_rank()
    tpc.setup_process_groups([("pipe", 3)])
    shapes = recv_obj_meta(None)
    obj = recv_forward(shapes) if rank else everything()
    if rank:
        assert shapes == [x if x is None else x.shape for x in everything()]
        for mine, sent in zip(obj, everything(), strict=True):
            assert (mine is None) == (sent is None)
            if mine is not None:
                torch.testing.assert_close(mine.detach(), sent.detach(), rtol=0, atol=0)
                assert mine.is_leaf and mine.requires_grad == mine.is_floating_point()
    send_obj_meta(obj)
    send_forward(obj)
    back = recv_backward([x if x is None else x.shape for x in obj])
    if rank < 2:
        assert [x is None for x in back] == [False, True, True, True, False, False]
        assert [x.dtype for x in back if x is not None] == [
            torch.float32, torch.float64, torch.bfloat16,
        ]  # fmt: skip
        assert torch.equal(back[0], obj[0] * 2) and not back[4].any() and not back[0].requires_grad
    send_backward([obj[0] * 2, None, None, None, None, None] if rank == 2 else back)


def test_lists_of_floats_integers_and_none_and_their_gradients(ranks):
    ranks(3).run(many_members)


def lists_and_ends() -> None:
    rank, p = dist.get_rank(), 3
    tpc.setup_process_groups([("pipe", p)])
    one = torch.full((2,), float(rank))
    last, first = rank == p - 1, rank == 0
    shape, shapes = one.shape, [one.shape]
    # to the next and from the previous: tensors come as tensors, lists as lists
    got = send_forward_recv_forward(one, shape)
    assert got is None if first else torch.equal(got.detach(), one - 1)
    got = send_forward_recv_forward([one], shapes)
    assert got is None if first else (isinstance(got, list) and torch.equal(got[0], one - 1))
    got = send_backward_recv_backward(one, shape)
    assert got is None if last else torch.equal(got, one + 1)
    both = send_forward_backward_recv_forward_backward(one, one, shape, shape)
    assert both[0] is None if first else torch.equal(both[0].detach(), one - 1)
    assert both[1] is None if last else torch.equal(both[1], one + 1)
    # a ring, where ranks run several stages
    ahead, behind = tpc.get_next_global_rank(), tpc.get_prev_global_rank()
    got = send_forward_recv_forward(one, shape, prev_rank=behind, next_rank=ahead)
    assert got[0] == (rank - 1) % p
    # one direction alone, in a dtype of its own
    got = send_forward_recv_forward(one.double(), shape, recv_prev=not last, dtype=torch.float64)
    if last:
        assert got is None
        got = recv_forward(shape, dtype=torch.float64)
    assert got is None if first else got.dtype == torch.float64
    if not first:
        with pytest.raises(CommError, match=f"the message from rank {rank - 1} is None"):
            recv_forward(None)


def test_ends_do_nothing_and_lists_stay_lists(ranks):
    ranks(3).run(lists_and_ends)


def parts() -> None:
    """tensor 2 x pipe 2: each sends half of what divides."""
    tpc.setup_process_groups([("pipe", 2), ("tensor", 2)])
    first = tpc.is_first_in_pipeline_group()
    obj = [torch.arange(12.0).reshape(3, 4), torch.arange(5.0), torch.arange(8)]
    mine = split_tensor_into_1d_equal_chunks(obj[0].t())
    assert mine.tolist() == obj[0].t().reshape(-1).chunk(2)[tpc.get_tp_rank()].tolist()
    assert torch.equal(gather_split_1d_tensor(mine), obj[0].t().reshape(-1))
    fresh = split_tensor_into_1d_equal_chunks(obj[0], new_buffer=True)
    assert fresh.untyped_storage().data_ptr() != obj[0].untyped_storage().data_ptr()
    with pytest.raises(LayoutError, match=facts_pattern("5 elements", "2 tensor")):
        split_tensor_into_1d_equal_chunks(obj[1])
    send_obj_meta(obj)
    shapes = recv_obj_meta(None)
    send_forward(obj, scatter_gather_tensors=True)
    got = recv_forward(shapes, scatter_gather_tensors=True)
    if not first:
        assert all(torch.equal(a.detach(), b) for a, b in zip(got, obj, strict=True))
        assert [x.requires_grad for x in got] == [True, True, False]
    send_backward([x * 2 for x in obj[:2]] + [None], scatter_gather_tensors=True)
    back = recv_backward([x.shape for x in obj], scatter_gather_tensors=True)
    if first:
        assert torch.equal(back[0], obj[0] * 2) and torch.equal(back[1], obj[1] * 2)
    peers = [r for r in tpc.get_ranks_in_group("pipe") if r != dist.get_rank()]
    sent = [
        call["shape"]
        for call in recorder.snapshot()["calls"]
        if call["operation"] == "send" and call["peer"] in peers and call["dtype"] != "uint8"
    ]
    assert sent == ([[6], [5], [4]] if first else [[6], [5]])


def test_tensor_ranks_send_their_part_and_join_what_comes(ranks):
    ranks(4).run(parts)
