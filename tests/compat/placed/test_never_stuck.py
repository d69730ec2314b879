"""Placed programs end, whatever their graph: on paper, and on ranks with the plain gradients."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from tests.compat.placed.graphs import calls, leaves, play_graph, random_graph
from tests.compat.placed.message_order import PlacedCall, backward_order, forward_order, play
from tests.tells import facts_pattern
from torchdistpackage.errors import ScheduleError


@pytest.mark.parametrize("num_places", [2, 3, 5, 8])
def test_random_programs_end_where_each_send_waits(num_places):
    """250 graphs, forward and two backwards, over ranks that buffer nothing."""
    for seed in range(250):
        graph = random_graph(seed, num_places)
        made = calls(graph, 1)
        order = forward_order(made)
        for root in graph.roots:
            order += backward_order(made, root + 1)
        own = {r: [m for m in order if r in (m.start, m.end)] for r in range(num_places)}
        assert sorted(play(own)) == sorted(order)


def test_places_of_several_ranks_end_too():
    sizes = ((0, 1), (1, 2, 3), (3,), (0, 2), (4, 5, 1))
    made = [
        PlacedCall(
            n + 1,
            sizes[n % 5],
            tuple((sizes[i % 5], i % 3 > 0) for i in (n + 2, 3 * n + 2)),
            tuple(range(max(1, n - 2), n + 1)),
        )
        for n in range(40)
    ]
    made = [c for c in made if all(source != c.ranks for source, _ in c.sources)]
    kept = {c.number for c in made}
    made = [
        PlacedCall(c.number, c.ranks, c.sources, tuple(p for p in c.parents if p in kept))
        for c in made
    ]
    order = forward_order(made) + backward_order(made, made[-1].number)
    assert any(m.kind == "B" for m in order)
    own = {r: [m for m in order if r in (m.start, m.end)] for r in range(6)}
    assert len(play(own)) == len(order)


def test_a_rank_in_another_order_is_stuck_and_named():
    made = [PlacedCall(2, (1,), (((0,), False),), ()), PlacedCall(3, (0,), (((1,), False),), ())]
    order = forward_order(made)
    with pytest.raises(
        ScheduleError, match=facts_pattern("rank 0", "F2.0", "0", "1", "rank 1", "F3.0", "1", "0")
    ):
        play({0: order, 1: order[::-1]})


def graphs_on_ranks(seeds: list[int]) -> None:
    """Each graph: the values and gradients of plain torch, and the messages of `routes`.

    Those of odd seeds run `ahead`.
    """
    import torch
    import torch.distributed as dist

    from torchdistpackage.compat.placed import DeviceFunctor

    rank, num = dist.get_rank(), dist.get_world_size()
    F = DeviceFunctor(["cpu"] * num)
    places = [F.place(r) for r in range(num)]

    def put(place, obj):
        with F.under(places[place]):
            return F(obj)

    for seed in seeds:
        graph = random_graph(seed, num)
        plain, mine = leaves(graph, seed), leaves(graph, seed)
        expected = play_graph(graph, plain, lambda place, obj: obj)
        posted: list[tuple[str, int, int]] = []
        begin = F.program._number + 1
        kinds_known = [node.kind != "pair" for node in graph.nodes]
        if F.program.mail is not None:
            F.program.mail.posted = posted
        with F.ahead() if seed % 2 else nullcontext():
            made = play_graph(graph, mine, put)
        for i, root in enumerate(graph.roots):
            expected[root].backward(retain_graph=i == 0)
            made[root].backward(retain_graph=i == 0)
        if all(kinds_known):  # nobody asked how many outputs there are
            order = forward_order(calls(graph, begin))
            for root in graph.roots:
                order += backward_order(calls(graph, begin), root + begin)
            words = {("F", True): "send", ("F", False): "receive"}
            words |= {("B", True): "send gradients", ("B", False): "receive gradients"}
            assert posted == [
                (words[m.kind, m.start == rank], m.operation, m.end if m.start == rank else m.start)
                for m in order
                if rank in (m.start, m.end)
            ], seed
        for i, x in mine.items():
            here = graph.nodes[i].place == rank
            assert (x.grad is not None) == (here and plain[i].grad is not None), (seed, i)
            if x.grad is not None:
                torch.testing.assert_close(
                    x.grad, plain[i].grad, rtol=1e-12, atol=1e-12, check_device=False
                )
        for i, root in enumerate(graph.roots):
            torch.testing.assert_close(
                made[root].full(), expected[root].detach(), check_device=False
            )
            assert i < 2
    F.finish()


SEEDS = range(100)


@pytest.mark.parametrize(
    ("num", "first"),
    [
        (2, 0),
        (3, 5),
        pytest.param(1, 100, marks=pytest.mark.full),
        *[pytest.param(2 + k % 3, 10 * k, marks=pytest.mark.full) for k in range(10)],
    ],
)
def test_random_programs_on_ranks_give_the_gradients_of_one_process(ranks, num, first):
    many = 10 if first % 10 == 0 and first else 5
    ranks(num).run(graphs_on_ranks, list(range(first, first + many)))


def test_random_programs_read_nothing_in_flight_and_send_from_no_host_memory(pool):
    """As NCCL would have it: calls end late, and memory of the host is no device's."""
    pool(2).run(graphs_on_ranks, list(range(10)), transport="late,strict")
