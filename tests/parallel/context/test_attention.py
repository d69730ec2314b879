"""Attention over parts of a sequence is that of the whole: output and gradients, within 1e-12."""

import itertools
import logging
import random
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from tests.parallel.context import whole
from tests.tells import facts_pattern, tells
from torchdistpackage import tpc
from torchdistpackage.comm import primitives
from torchdistpackage.comm.p2p import Post
from torchdistpackage.errors import LayoutError
from torchdistpackage.layout.exchanges import EXCHANGES
from torchdistpackage.parallel import (
    context_attention,
    gather_sequence,
    sequence_positions,
    shard_sequence,
)
from torchdistpackage.parallel.context import exchange, merge, visibility
from torchdistpackage.parallel.context.order import SequenceOrder

EXACT = 1e-12
WAYS = tuple(EXCHANGES)
MASKS = [
    (causal, window, docs)
    for causal in (True, False)
    for window in (None, 1, 7)
    for docs in (False, True)
]


def cases(size: int) -> list[tuple]:
    """All of `size` ranks: comm type, order, heads, length, causal, window, documents."""
    heads = {3: [(6, 6), (6, 2), (6, 3)], 5: [(5, 5)]}.get(size, [(8, 8), (8, 2), (8, 1)])
    lengths = (4 * size, 4 * size + 3, 37)
    return [
        (way, order, some, seq_len, *mask)
        for way, order, some, seq_len, mask in itertools.product(
            WAYS, ("zigzag", "contiguous"), heads, lengths, MASKS
        )
        if EXCHANGES[way].swap != "blocks" or size in (4, 8)
    ]


def small(size: int, num: int) -> list[tuple]:
    """Of these some of every way, and of a ring in which parts are passed on."""
    found = []
    for way in WAYS:
        some = [case for case in cases(size) if case[0] == way]
        random.Random(size).shuffle(some)
        found += some[:num]
    unmasked = [case for case in cases(size) if case[4:] == (False, None, False)]
    return found + [case for case in unmasked if case[0] == "p2p"][1:8:5]


def attend(size: int, chosen: list[tuple], tile: int) -> None:
    visibility.TILE = tile  # as if chunks were long: masks are of tiles, and many are left out
    try:
        for case in chosen:
            tpc.setup_process_groups([("context", size)])
            found = whole.difference(*case)
            assert found < EXACT, (case, found)
            tpc.destroy()
    finally:
        visibility.TILE = 2048


def marks_of(size: int) -> list[pytest.MarkDecorator]:
    """Four ranks have every way, and are fewer than eight."""
    return [] if size in (1, 4) else [pytest.mark.full]


def sized():
    for size in (4, 1, 2, 3, 8):
        yield pytest.param(
            size, {1: 3, 4: 3, 8: 3}.get(size, 6), id=f"{size}", marks=marks_of(size)
        )
        for part in range(4):
            yield pytest.param(size, -part - 1, id=f"{size}-all-{part}", marks=pytest.mark.full)


@pytest.mark.parametrize(("size", "num"), list(sized()))
def test_it_is_the_attention_of_one_process(ranks, size, num):
    chosen = small(size, num) if num > 0 else cases(size)[-num - 1 :: 4]
    ranks(size).run(attend, size, chosen, 5, timeout_s=300)


def plain(size: int) -> None:
    """As the issue of a user's own loop has it, with tpc's defaults."""
    tpc.setup_process_groups([("data", size // 2), ("context", 2)])
    q, k, v, grad = whole.random_qkv(4, 4, 24)
    truth = whole.one_process(
        [x.clone() for x in (q, k, v, grad)], whole.seen(24, True, None, None)
    )
    parts = [shard_sequence(x, dim=2).requires_grad_() for x in (q, k, v)]
    y = context_attention(*parts, is_causal=True)
    joined = gather_sequence(y, dim=2)
    assert torch.equal(sequence_positions(24), shard_sequence(torch.arange(24), dim=0))
    torch.testing.assert_close(joined, truth[0], rtol=0, atol=EXACT)
    joined.backward(grad)  # equal on all ranks, so that each takes its own part of it
    for part, want in zip(parts, truth[1:], strict=True):
        torch.testing.assert_close(gather_sequence(part.grad, 2), want, rtol=0, atol=EXACT)


def test_a_loop_of_ones_own(ranks):
    ranks(4).run(plain, 4)


def sharded(size: int) -> None:
    tpc.setup_process_groups([("context", size)])
    for order, seq_len, dim in itertools.product(("zigzag", "contiguous"), (2 * size, 29), (0, 1)):
        x = torch.randn(seq_len, 3).movedim(0, dim).requires_grad_()
        part = shard_sequence(x, dim, order=order)
        back = gather_sequence(part, dim, order=order)
        assert torch.equal(back, x)
        assert torch.equal(gather_sequence(part, dim, order=order, seq_len=seq_len), x)
        weights = torch.randn(x.shape)
        (grad,) = torch.autograd.grad((back * weights).sum(), x)
        assert torch.equal(grad, weights), "they are each other's transpose"
        lengths = primitives.gather_objects(part.shape[dim])
        assert sum(lengths) == seq_len and max(lengths) - min(lengths) <= 2


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sequence_comes_back_as_it_was(ranks, size):
    ranks(size).run(sharded, size)


def strided() -> None:
    """Of one sample heads may be next to each other, and the gradient of a sum is one number."""
    tpc.setup_process_groups([("context", 2)])
    q, k, v, _ = (x[:1].permute(0, 3, 2, 1).contiguous() for x in whole.random_qkv(4, 4, 16))
    parts = [shard_sequence(x, 2).permute(0, 3, 2, 1) for x in (q, k, v)]
    parts = [x.detach().requires_grad_() for x in parts]
    assert all(x.stride(3) != 1 for x in parts)
    wholes = [x.permute(0, 3, 2, 1).detach().requires_grad_() for x in (q, k, v)]
    F.scaled_dot_product_attention(*wholes, is_causal=True).sum().backward()
    for way in ("p2p", "all_gather", "a2a"):
        out = context_attention(*parts, is_causal=True, comm_type=way)
        grads = torch.autograd.grad(out.sum(), parts)
        for grad, one in zip(grads, wholes, strict=True):
            torch.testing.assert_close(gather_sequence(grad, 2), one.grad, rtol=0, atol=EXACT)


def test_any_strides_will_do(ranks):
    ranks(2).run(strided)


def not_seen(size: int) -> list[int]:
    """Positions that a rank sends, over all hops, under a causal mask, a window, and documents."""
    tpc.setup_process_groups([("context", size)])
    group, found = tpc.get_group("context"), []
    parts = SequenceOrder(8 * size, size, "contiguous").parts
    block = torch.arange(size).repeat_interleave(8)[None]
    for what in (
        visibility.Visibility(),
        visibility.Visibility(is_causal=True),
        visibility.Visibility(is_causal=True, window=2),
        visibility.Visibility(documents=visibility.Documents(block)),
    ):
        ring = exchange.Ring(group, parts, what)
        found.append(sum(s.stop - s.start for hop in ring.hops for s in hop.sent))
        for hop in ring.hops:
            assert bool(hop.tasks) == bool(hop.num_received)
    return found


def test_what_nobody_sees_is_not_sent(ranks):
    sent = ranks(4).run(not_seen, 4)
    whole, causal, window, documents = (sum(column) for column in zip(*sent, strict=True))
    assert whole == 4 * 3 * 8
    assert causal == (3 + 2 + 1) * 8, "contiguous parts: to later ranks alone"
    assert window == 3 * 8, "to the next rank alone"
    assert documents == 0


def peers(size: int) -> list[set[tuple[str, int]]]:
    """Which ranks a rank sends to and receives from, without a mask and with a causal one."""
    tpc.setup_process_groups([("context", size)])
    found: list[set[tuple[str, int]]] = []
    send, receive = Post.send, Post.receive

    def noted(name, call):
        def noting(self, tensors, rank, *args, **kwargs):
            found[-1].add((name, rank))
            return call(self, tensors, rank, *args, **kwargs)

        return noting

    q, k, v, grad = whole.random_qkv(2, 2, 8 * size + 1)
    with (
        patch.object(Post, "send", noted("to", send)),
        patch.object(Post, "receive", noted("from", receive)),
    ):
        for is_causal in (False, True):
            parts = [shard_sequence(x, 2).requires_grad_() for x in (q, k, v)]
            found.append(set())
            out = context_attention(*parts, is_causal=is_causal)
            out.backward(shard_sequence(grad, 2))
    return found


def test_without_a_mask_a_rank_has_two_peers(ranks):
    for rank, (neighbours, every) in enumerate(ranks(4).run(peers, 4)):
        assert neighbours == {("to", (rank + 1) % 4), ("from", (rank - 1) % 4)}
        assert len(every) == 6, "the owner sends what is seen of its part"


def overlapped(size: int) -> list[list[str]]:
    """Posts and computations, in order, of a forward and of its backward."""
    tpc.setup_process_groups([("context", size)])
    events: list[str] = []

    def noted(name, function):
        def call(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)

        return call

    q, k, v, grad = whole.random_qkv(2, 2, 8 * size)
    parts = [shard_sequence(x, 2).requires_grad_() for x in (q, k, v)]
    with (
        patch.object(exchange.Ring, "_post", noted("post", exchange.Ring._post)),
        patch.object(merge.Merged, "add", noted("compute", merge.Merged.add)),
        patch.object(merge.Backward, "part", noted("compute", merge.Backward.part)),
    ):
        out = context_attention(*parts, is_causal=True)
        num = len(events)
        out.backward(shard_sequence(grad, 2))
    return [events[:num], events[num:]]


def test_the_next_hop_travels_while_one_is_computed(ranks):
    """Under the late transport what is read before its wait is NaN; here is that a post comes
    before the computation that hides it."""
    for forward, backward in ranks(3).run(overlapped, 3):
        assert forward == ["post", "compute"] * 3
        assert backward == ["post", "compute"] * 3 + ["post"]


def dropped() -> None:
    """Of ones: each output is the share of weights kept, over (1 - p); its mean is 1."""
    tpc.setup_process_groups([("context", 2)])
    torch.manual_seed(tpc.rank)
    q = torch.zeros(4, 8, 128, 8, dtype=torch.float64, requires_grad=True)
    k = torch.zeros(4, 8, 128, 8, dtype=torch.float64)
    v = torch.ones(4, 8, 128, 8, dtype=torch.float64, requires_grad=True)
    for way in ("p2p", "a2a"):
        out = context_attention(q, k, v, dropout_p=0.25, comm_type=way)
        (grad,) = torch.autograd.grad(out.sum(), v)
        out = out.detach()
        assert abs(float(out.mean()) - 1) < 0.01 and float(out.std()) > 0.01
        # the same weights are dropped again: sum of out = sum over v of its gradient, as v is ones
        sums = torch.stack([out.sum(), grad.sum()])
        sums = primitives.all_reduce(sums, tpc.get_group("context")).tolist()
        assert abs(sums[0] - sums[1]) < 1e-9 * sums[0]


def test_dropout_drops_the_same_weights_in_the_backward(ranks):
    ranks(2).run(dropped)


def halves() -> None:
    """bfloat16 and autocast: as near to float64 as one process is."""
    tpc.setup_process_groups([("context", 2)])
    q, k, v, _ = whole.random_qkv(4, 2, 64, 16)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    short = [x.bfloat16() for x in (q, k, v)]
    alone = F.scaled_dot_product_attention(*short, is_causal=True, enable_gqa=True)
    parts = [shard_sequence(x, 2) for x in short]
    mine = gather_sequence(context_attention(*parts, is_causal=True, enable_gqa=True), 2)
    assert mine.dtype is torch.bfloat16
    assert (mine - exact).abs().max() < 1.5 * (alone - exact).abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        wide = [shard_sequence(x.float(), 2) for x in (q, k, v)]
        out = context_attention(*wide, is_causal=True, enable_gqa=True)
    assert out.dtype is torch.bfloat16


def test_narrow_numbers(ranks):
    ranks(2).run(halves)


def refused(size: int) -> list[str]:
    tpc.setup_process_groups([("context", size)])
    texts = []

    def fails(**given) -> None:
        shape = given.pop("shape", (1, 4, 8, 8))
        kv = given.pop("kv", shape)
        q, k = torch.zeros(shape), torch.zeros(kv)
        with pytest.raises(LayoutError) as error:
            context_attention(q, k, given.pop("v", k), **given)
        texts.append(str(error.value))

    rank = tpc.rank
    with pytest.raises(LayoutError, match=facts_pattern("3 positions", "4 chunks")):
        shard_sequence(torch.zeros(3), 0)
    fails(shape=(1, 4, 8 + 3 * rank, 8))
    fails(shape=(1, 4 + rank, 8, 8), is_causal=bool(rank))
    fails(shape=(1, 3, 8, 8), comm_type="a2a")
    fails(kv=(1, 2, 8, 8))
    fails(kv=(1, 3, 8, 8), enable_gqa=True)
    fails(comm_type="ring")
    fails(order="striped")
    fails(window=0)
    fails(dropout_p=1.0)
    fails(document_ids=torch.zeros(1, 16, dtype=torch.int64))
    fails(seq_len=23)
    fails(comm_type="a2a+p2p", a2a_size=3)
    with pytest.raises(LayoutError, match="rank 0 8, rank 1 11"):
        gather_sequence(torch.zeros(8 + 3 * rank), 0)
    return texts


def test_what_is_no_attention_is_refused_on_all_ranks(ranks):
    first, second = ranks(2).run(refused, 2)
    expected = (
        "for 19 positions together they would hold rank 0 9, rank 1 10",
        "heads of q: rank 0 has 4, rank 1 has 5; heads of k: rank 0 has 4, rank 1 has 5; is_causal",
        "3 heads of queries and 3 of keys and values cannot be shared",
        "pass enable_gqa=True",
        "4 heads of queries are not a multiple of 3",
        "use one of p2p, all_gather, a2a, a2a+p2p, auto",
        "no order 'striped'",
        "window=0",
        "dropout_p=1.0",
        "pass integers of shape (B, S_local) = (1, 8)",
        "of a sequence of 23",
        "a2a_size=3",
    )
    for texts in (first, second):
        for text, part in zip(texts, expected, strict=True):
            assert part in text, text


def choices() -> list[str]:
    """What auto takes is logged once, by the first rank."""
    tpc.setup_process_groups([("context", 2)])
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    log = logging.getLogger("torchdistpackage.parallel.context.attention")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    q = torch.zeros(1, 4, 8, 8)
    for _ in range(2):
        context_attention(q, q, q, comm_type="auto")
    log.removeHandler(handler)
    return heard


def test_auto_says_what_it_takes(ranks):
    (said,), others = ranks(2).run(choices)
    assert tells(said, "16 positions", "4 heads", "4", "2 ranks")
    assert others == []
