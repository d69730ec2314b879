"""Messages arrive as they were described, whatever they hold."""

from itertools import product

import pytest
import torch
import torch.distributed as dist

from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.comm.groups import Groups
from torchdistpackage.comm.p2p import SMALL_BYTES, Post
from torchdistpackage.comm.tensor_channel import (
    SendQueue,
    TensorChannel,
    expect_payload,
    send_payload,
)
from torchdistpackage.comm.tensor_meta import (
    HEADER_BYTES,
    MessageSpec,
    decode,
    describe,
    encode,
    tensors_of,
)
from torchdistpackage.errors import CommError

CPU = torch.device("cpu")
DTYPES = [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
MESSAGES = [
    torch.arange(6.0).view(2, 3),
    torch.arange(6.0).view(2, 3).t(),
    torch.tensor(3.5, dtype=torch.float64),
    torch.empty(0, 4),
    None,
    (),
    {},
    (torch.ones(2, requires_grad=True), None, torch.arange(3)),
    {"x": torch.ones(1, requires_grad=True), "mask": torch.tensor([True, False]), "none": None},
    tuple(torch.zeros(2, dtype=dtype) for dtype in DTYPES),
    {f"a rather long key number {i}": torch.full((i,), float(i)) for i in range(60)},
]


def same(a, b) -> bool:
    return (
        describe(a) == describe(b)
        and (not isinstance(a, dict) or list(a) == list(b))
        and all(
            (x is None and y is None) or (torch.equal(x, y) and x.dtype == y.dtype)
            for x, y in zip(tensors_of(a), tensors_of(b), strict=True)
        )
    )


@pytest.mark.parametrize("message", MESSAGES, ids=range(len(MESSAGES)))
def test_a_description_survives_its_header(message):
    parts = encode(describe(message))
    assert len(parts[0]) == HEADER_BYTES
    assert decode(b"".join(x.numpy().tobytes() for x in parts)) == describe(message)


def round_trip() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    channel = TensorChannel(group, CPU, 20)
    for message, batched in product(MESSAGES, (False, True)):
        post = Post(group, timeout_s=20)
        if rank == 0:
            spec = channel.send_header(describe(message), 1)
            assert spec.matches(message)
            if batched:
                send_payload(post, spec, tensors_of(message), 1)
                post.go().wait()
            else:
                channel.send(spec, tensors_of(message), 1)
        else:
            spec = channel.receive_header(0)
            if batched:
                incoming = expect_payload(post, spec, 0)
                post.go()
            else:
                incoming = channel.receive(spec, 0)
            received = incoming.wait()
            for i in spec.wanting:
                received[i].requires_grad_()
            got = spec.description.build(received)
            assert same(got, message), message
    channel.settle()


def test_every_kind_of_message_arrives_unchanged(ranks):
    ranks(2).run(round_trip)


class Sent:
    """A work that says when it was waited for."""

    def __init__(self, number: int, waited: list[int]):
        self._number, self._waited = number, waited

    def wait(self) -> None:
        self._waited.append(self._number)


@pytest.mark.parametrize(
    ("bounds", "waited"),
    [
        ({}, []),
        ({"max_sends": 2}, [0, 1]),
        ({"max_bytes": 75}, [0, 1]),  # 100 before it waits, 70 after it
        ({"max_sends": 3, "max_bytes": 30}, [0, 1, 2, 3]),  # the last one alone is too much
    ],
    ids=str,
)
def test_a_queue_of_sends_waits_for_the_oldest_beyond_its_bounds(bounds, waited):
    queue, seen = SendQueue(**bounds), []
    for number in range(4):
        queue.add(Sent(number, seen), 10 * (number + 1))
    assert seen == waited
    queue.settle()
    assert seen == [0, 1, 2, 3]
    queue.add(Sent(4, seen), 10)
    queue.reset()
    queue.settle()
    assert seen == [0, 1, 2, 3], "what was let go is not waited for"


def both_ways_large() -> None:
    """Both ranks send first in their own minds; 8 MiB does not fit any buffer."""
    peer = 1 - dist.get_rank()
    room, mine = torch.empty(2**20, dtype=torch.float64), torch.full((2**20,), float(peer)).double()
    post = Post(dist.group.WORLD, timeout_s=20)
    post.send([mine], peer)
    post.receive([room], peer)
    post.go().wait()
    assert bool((room == dist.get_rank()).all())


def test_large_messages_cross_without_waiting_for_each_other(ranks):
    ranks(2).run(both_ways_large)


def order_of_posting() -> list[str]:
    for elements in (SMALL_BYTES // 8, SMALL_BYTES // 8 + 1):
        post = Post(dist.group.WORLD, timeout_s=20)
        mine, room = torch.ones(elements).double(), torch.empty(elements).double()
        post.send([mine], 1 - dist.get_rank())
        post.receive([room], 1 - dist.get_rank())
        post.go().wait()
        assert torch.equal(mine, room)
    return [call["operation"] for call in recorder.snapshot(num=4)["calls"]]


def test_small_messages_are_sent_first_and_large_ones_received_first(ranks):
    for posted in ranks(2).run(order_of_posting):
        assert posted == ["send", "receive", "receive", "send"]


def late_peer() -> None:
    rank = dist.get_rank()
    if rank < 2:  # a group of their own: a limit that ran out closes its connections
        group = Groups(rank).of([0, 1])
    if rank == 0:
        post = Post(group, timeout_s=0.5)
        post.receive([torch.empty(1)], 1)
        with pytest.raises(CommError, match=r"receive from rank 1 over .* failed .*500ms"):
            post.go().wait()


@pytest.mark.own_transport("a message of gloo has a limit of its own")
def test_a_peer_that_never_sends_is_reported_within_the_limit(ranks):
    ranks(3).run(late_peer)


def test_what_cannot_travel_is_refused_by_name():
    with pytest.raises(CommError, match="member 1 of a message between stages is a str"):
        describe((torch.zeros(1), "text"))
    with pytest.raises(CommError, match="keys of a message between stages must be strings"):
        describe({1: torch.zeros(1)})


def test_gradients_go_back_only_for_what_wants_one():
    wanted = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
    template = MessageSpec(describe((wanted, torch.arange(2), None, torch.zeros(1))), CPU)
    (gradient,) = template.allocate_gradients()
    assert gradient.shape == (2,) and gradient.dtype is torch.complex64
    assert template.scatter_grads([gradient]) == (gradient, None, None, None)


def test_a_form_takes_what_needs_no_gradient_any_more_but_no_new_one():
    plain, wanting = torch.zeros(2), torch.zeros(2, requires_grad=True)
    assert MessageSpec(describe(wanting), CPU).matches(plain)
    assert not MessageSpec(describe(plain), CPU).matches(wanting)
    assert str(describe((plain, wanting))) == "tuple(float32[2], float32[2] requires_grad)"


@pytest.mark.parametrize("message", MESSAGES, ids=range(len(MESSAGES)))
def test_a_template_fits_its_own_message_alone(message):
    for other in MESSAGES:
        fits = MessageSpec(describe(message), CPU).matches(other)
        assert fits == (describe(other) == describe(message))
