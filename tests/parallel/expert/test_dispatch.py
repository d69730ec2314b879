"""What travels, in what order, and what becomes of tokens that find no place or have no number."""

import pytest
import torch

from tests.harness.planting import planted
from tests.parallel.expert.one_process import drawn
from tests.tells import facts_pattern, tells
from torchdistpackage.comm import primitives
from torchdistpackage.comm.backends import is_queued
from torchdistpackage.comm.moments import OnHost
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.errors import DataError, LayoutError, RaceError, RankError
from torchdistpackage.layout.moe import MoEShape
from torchdistpackage.parallel import MoELayer
from torchdistpackage.parallel.expert.capacity import kept_choices
from torchdistpackage.parallel.expert.dispatch import TokenExchange, plan_dispatch
from torchdistpackage.parallel.expert.experts import bounds
from torchdistpackage.testing import mirror, ordered_streams

DIM = 4


def routed(seeds: range) -> None:
    """Rows that come are those that were chosen, sorted by expert; back they are where they were,
    and gradients go the same way. Experts are uneven over ranks; some routings use one alone."""
    tpc.setup_process_groups([("data", tpc_size())], expert=tpc_size())
    group = tpc.get_group("expert")
    for seed in seeds:
        draw = torch.Generator().manual_seed(seed)
        num_experts = int(torch.randint(group.size(), 9, (1,), generator=draw))
        top_k = int(torch.randint(1, min(3, num_experts) + 1, (1,), generator=draw))
        tokens = [int(n) for n in torch.randint(0, 7, (group.size(),), generator=draw)]
        used = int(torch.randint(top_k, num_experts + 1, (1,), generator=draw))
        experts = [
            torch.rand(n, used, generator=draw).argsort(-1)[:, :top_k] + (num_experts - used)
            for n in tokens
        ]
        keep = [torch.rand(n, top_k, generator=draw) < 0.8 for n in tokens]
        x = [torch.randn(n, DIM, generator=draw, dtype=torch.float64) for n in tokens]
        mine, rank = x[group.rank()].requires_grad_(), group.rank()
        kept = keep[rank] if seed % 2 else None
        start = bounds(num_experts, group.size())
        plan, bad = plan_dispatch(experts[rank], kept, torch.tensor(False), start, group)
        assert not bad
        rows = plan.by_expert(plan.start(plan.rows_of(mine)).wait())
        expected = [
            x[r][t]
            for e in range(start[rank], start[rank + 1])
            for r in range(group.size())
            for t, k in (experts[r] == e).nonzero().tolist()
            if not seed % 2 or keep[r][t, k]
        ]
        assert torch.equal(rows, torch.stack(expected) if expected else rows[:0])
        assert plan.counts.sum() == len(expected)
        weights = torch.rand(*experts[rank].shape, generator=draw, dtype=torch.float64)
        y = plan.combine(plan.send_back(plan.by_rank(rows * 2)), weights)
        share = (weights if kept is None else weights * kept).sum(-1, keepdim=True)
        torch.testing.assert_close(y, 2 * share * mine)
        (grad,) = torch.autograd.grad(y.sum(), mine)
        torch.testing.assert_close(grad, (2 * share).expand_as(mine))


def tpc_size() -> int:
    return torch.distributed.get_world_size()


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 200), marks=pytest.mark.full)], ids=str
)
def test_drawn_routings_travel_there_and_back(ranks, seeds):
    ranks(3).run(routed, seeds)


def sent_bytes() -> None:
    """Of what was chosen everything travels once each way, less what stays here, and nothing else
    but the counts; the backward is the same."""
    tpc.setup_process_groups([("data", 2)], expert=2)
    layer = MoELayer(DIM, 6, 4, top_k=2, dtype=torch.float64)
    x = drawn(tpc.rank, 5, 3, DIM).requires_grad_()
    sent, plain = [], primitives.all_to_all

    def counted(rows, group, send=None, receive=None, async_op=False):
        sent.append(sum(n for r, n in enumerate(send) if r != group.rank()) * DIM * 8)
        assert rows.nbytes == sum(send) * DIM * 8
        return plain(rows, group, send, receive, async_op)

    primitives.all_to_all = counted
    try:
        y = layer(x)
        experts = layer.router(x).experts
        other = int((experts // 2 != tpc.rank).sum())
        from_other = int(primitives.all_reduce(torch.tensor(other), tpc.get_group("data"))) - other
        y.sum().backward()
    finally:
        primitives.all_to_all = plain
    row = DIM * 8
    assert sent == [other * row, from_other * row, other * row, from_other * row]


def test_only_what_was_chosen_travels(ranks):
    ranks(2).run(sent_bytes)


def shared_meanwhile() -> tuple[bool, list[str], list[str]]:
    """Whether calls are queued; the order of calls of a layer with a shared expert."""
    tpc.setup_process_groups([("data", 2)], expert=2)
    layer = MoELayer(DIM, 6, 4, top_k=2, shared_hidden=5, dtype=torch.float64)
    calls: list[str] = []
    start, read = primitives.all_to_all, OnHost.read

    def noted(*args, **kwargs):
        work = start(*args, **kwargs)
        calls.append("start")
        wait = work.wait
        work_type = type(work)

        class Noted(work_type):
            __slots__ = ()

            def wait(self):
                calls.append("wait")
                return wait()

        return Noted()

    layer.shared.register_forward_hook(lambda *_: calls.append("shared"))
    primitives.all_to_all = noted
    OnHost.read = lambda self: calls.append("read") or read(self)
    try:
        y = layer(drawn(0, 5, 3, DIM).requires_grad_())
        forward = list(calls)
        calls.clear()
        layer.shared.down.weight.register_hook(lambda _: calls.append("shared"))
        y.sum().backward()
    finally:
        primitives.all_to_all, OnHost.read = start, read
    return is_queued(tpc.get_group("expert")), forward, calls


def test_a_shared_expert_computes_while_tokens_travel(ranks):
    """On a device it begins before the host waits for the counts."""
    for queued, forward, backward in ranks(2).run(shared_meanwhile):
        first = ["shared", "read", "start"] if queued else ["read", "start", "shared"]
        assert forward == [*first, "wait", "start", "wait"]
        assert backward in (
            ["start", "wait", "start", "shared", "wait"],
            ["shared", "start", "wait", "start", "wait"],
            ["start", "shared", "wait", "start", "wait"],
        )


def layers(num: int, **options) -> tuple[torch.nn.Sequential, torch.Tensor]:
    tpc.setup_process_groups([("data", 4)], expert=4)
    made = [MoELayer(DIM, 6, 4, top_k=2, dtype=torch.float64, **options) for _ in range(num)]
    return torch.nn.Sequential(*made), drawn(0, 5, 3, DIM).requires_grad_()


@pytest.mark.parametrize(
    ("options", "num_syncs"),
    [
        ({}, 1),
        ({"shared_hidden": 5}, 1),
        ({"capacity_factor": 2.0}, 1),
        ({"capacity_factor": 2.0, "pad_to_capacity": True, "shared_hidden": 5}, 0),
    ],
    ids=str,
)
def test_the_host_waits_once_for_each_layer_or_never_and_not_in_a_backward(options, num_syncs):
    with mirror(4), ordered_streams() as history:
        net, x = layers(3, check_nan=False, **options)
        before = history.num_host_syncs
        y = net(x)
        assert history.num_host_syncs - before == 3 * num_syncs
        y.sum().backward()
        assert history.num_host_syncs - before == 3 * num_syncs


def padded_beside_counted() -> None:
    """Outputs, gradients and what travels of two layers with one set of weights; one pads."""
    tpc.setup_process_groups([("data", 2)], expert=2)
    common = {"shared_hidden": 5, "bias": True, "gated": False, "dtype": torch.float64}
    for factor, top_k in ((0.7, 2), (2.5, 1), (5.0, 2)):
        sizes = {"num_experts": 5, "top_k": top_k, "capacity_factor": factor}
        counted = MoELayer(DIM, 6, **sizes, **common)
        layer = MoELayer(DIM, 6, **sizes, **common, pad_to_capacity=True)
        layer.load_state_dict(counted.state_dict())
        x = drawn(tpc.rank, 5, 3, DIM)
        sent, plain = [], primitives.all_to_all

        def noted(rows, group, send=None, receive=None, async_op=False):
            sent.append((tuple(send), tuple(receive)))  # noqa: B023
            return plain(rows, group, send, receive, async_op)  # noqa: B023

        results = []
        for each in (counted, layer):
            each.zero_grad()
            input_ = x.clone().requires_grad_()
            primitives.all_to_all = noted
            try:
                sent.clear()
                y = each(input_)
                (y * drawn(9, 5, 3, DIM)).sum().backward()
            finally:
                primitives.all_to_all = plain
            grads = [p.grad for p in each.parameters()]
            assert all(grad is not None for grad in grads)
            results.append([y, input_.grad, *grads])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
        places = min(-int(-factor * 5 * top_k // 5), 5) * 3
        own = (3, 2)[tpc.rank] * places
        there, back = ((3 * places, 2 * places), (own, own)), ((own, own), (3 * places, 2 * places))
        assert sent == [there, back, there, back], "the shape of x alone says what is sent"
        layer.eval()(drawn(tpc.rank, 5, 2 + tpc.rank, DIM))  # counts say sizes that differ


def test_padding_changes_no_number_and_fixes_what_travels(ranks):
    ranks(2).run(padded_beside_counted)


def begun_late() -> TokenExchange:
    """An exchange that has its sizes after other work."""
    tpc.setup_process_groups([("data", 4)], expert=4)
    rows = torch.ones(4, DIM).mul(2)
    exchange = TokenExchange(rows, tpc.get_group("expert"), begins_late=True)
    torch.ones(3).mul(2)
    return exchange.begin((1, 1, 1, 1), (1, 1, 1, 1))


def test_an_exchange_that_begins_late_waits_for_its_rows_and_is_waited_for():
    with mirror(4), ordered_streams():
        net, x = layers(2, shared_hidden=5)
        net(x).sum().backward()
    with mirror(4), ordered_streams():
        begun_late().wait().add(1)
    line = "stream.wait_event(self._there)"
    refused = pytest.raises(RaceError, match=r"all_to_all .* reads memory that aten.mul")
    with mirror(4), planted(TokenExchange, "begin", line, "pass"), ordered_streams(), refused:
        begun_late()


def test_an_exchange_that_begins_late_waits_for_nothing_else():
    """Or one that is given between the two would be in order with it."""
    with mirror(4), ordered_streams():
        tpc.setup_process_groups([("data", 4)], expert=4)
        rows = torch.ones(4, DIM)
        exchange = TokenExchange(rows, tpc.get_group("expert"), begins_late=True)
        rows.add_(1)
        with pytest.raises(RaceError, match=r"all_to_all .* reads memory that aten.add_"):
            exchange.begin((1, 1, 1, 1), (1, 1, 1, 1))


def test_equal_scores_are_chosen_by_index_and_capacity_drops_the_last(ranks):
    experts = torch.tensor([[[0, 1]], [[0, 2]], [[1, 0]]])  # (S, B, k)
    kept = kept_choices(experts, 3, 2)
    assert kept[:, 0].tolist() == [[True, True], [True, True], [True, False]]
    ranks(1).run(tied)
    ranks(1).run(nan_with_padding)


def tied() -> None:
    layer = MoELayer(DIM, 6, 5, top_k=3)
    with torch.no_grad():
        layer.router.weight.zero_()
    assert layer.router(torch.randn(4, 2, DIM)).experts.eq(torch.arange(3)).all()


def nan_with_padding() -> None:
    layer = MoELayer(DIM, 6, 4, capacity_factor=1.0, pad_to_capacity=True)
    x = torch.full((5, 2, DIM), torch.nan)
    if is_queued(layer.groups.expert):  # as on a device, of which no host reads anything
        assert layer(x).isnan().all()
        return
    with pytest.raises(DataError, match="scores are NaN"):
        layer(x)


def nan_on_rank_1() -> None:
    tpc.setup_process_groups([("data", 2)], expert=2)
    layer = MoELayer(DIM, 6, 4, name="blocks.3.mlp")
    x = torch.randn(5, 2, DIM)
    if tpc.rank == 1:
        x[3, 1] = torch.nan
    layer(x)


def test_nan_scores_are_named_by_all_ranks(ranks):
    with pytest.raises(RankError) as raised:
        ranks(2).run(nan_on_rank_1)
    assert tells(
        str(raised.value),
        "blocks.3.mlp",
        "rank 1",
        "NaN",
        "1",
        "10 tokens",
        "token 3",
        "sequence 1",
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"top_k": 5}, "top_k=5 experts for each token, of num_experts=4; set top_k to 4 or less"),
        ({"capacity_factor": 0.0}, "capacity_factor=0 leaves the experts no place"),
        ({"pad_to_capacity": True}, "set it, to 2 (num_experts / top_k) if no token may be"),
        ({"num_groups": 3}, "num_experts=4 cannot be num_groups=3 equal groups"),
        (
            {"num_groups": 4, "top_groups": 1},
            "top_groups=1 of num_groups=4 leave 1 experts, but top_k=2; set top_groups to 2",
        ),
        ({"top_groups": 2}, "top_groups=2 of num_groups=1; set it between 1 and 1"),
        ({"score": "tanh"}, "score='tanh' is unknown; use softmax, sigmoid"),
        ({"shared_gate": True}, "shared_gate without shared_hidden"),
        ({"num_experts": 0}, "num_experts=0; set it to 1 or more"),
        ({"jitter": 1.5, "z_loss": -1.0}, "2 problems"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(options, text):
    with pytest.raises(LayoutError) as raised:
        MoEShape(**{"num_experts": 4, "top_k": 2, "hidden": 8, **options})
    assert text in str(raised.value)


def refused() -> None:
    tpc.setup_process_groups([("data", 2)], expert=2)
    with pytest.raises(LayoutError, match=facts_pattern("1 experts", "2 expert")):
        MoELayer(DIM, 6, 1, top_k=1)
    with pytest.raises(DataError, match=r"got x of shape \(3, 4\); give \(S, B, D\)"):
        MoELayer(DIM, 6, 2)(torch.randn(3, DIM))
    with pytest.raises(TypeError, match="no option num_shared"):
        MoELayer(DIM, 6, 2, num_shared=3)


def test_what_does_not_fit_the_ranks_is_refused(ranks):
    ranks(2).run(refused)
