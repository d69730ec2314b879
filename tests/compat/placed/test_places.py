"""Places that are several devices of a rank, groups of tensor-parallel ranks, stages of a chain."""

from __future__ import annotations

import pytest

from tests.compat.placed.test_programs import at, float64, same
from torchdistpackage.errors import PlacementError


def tensor_parallel() -> None:
    """A product split over ranks 0 and 1, between parts that ranks 1 and 2 hold alone."""
    import torch
    from torch import nn

    from torchdistpackage.compat.placed import DeviceFunctor
    from torchdistpackage.parallel import ColumnLinear, RowLinear

    torch.set_default_dtype(torch.float64)
    F = DeviceFunctor(["cpu"] * 3)
    rank = F.program.rank
    both = F.allocate_device(2)
    alone, after = F.place(1), F.allocate_device()
    assert (both.ranks, after.ranks) == ((0, 1), (2,)) and F.allocate_device() == F.place(0)
    group = F.group_of(both)
    assert (group is None) == (rank == 2)
    torch.manual_seed(5)
    up, down = nn.Linear(6, 8), nn.Linear(8, 6)
    x, w = float64(4, 6), float64(6, 6)
    px, pw = (t.detach().clone().requires_grad_() for t in (x, w))

    def split():
        mine = slice(4 * rank, 4 * rank + 4)
        made = nn.Sequential(
            ColumnLinear(6, 8, group=group), nn.GELU(), RowLinear(8, 6, group=group)
        )
        with torch.no_grad():
            made[0].weight.copy_(up.weight[mine])
            made[0].bias.copy_(up.bias[mine])
            made[2].weight.copy_(down.weight[:, mine])
            made[2].bias.copy_(down.bias)
        return made

    with F.under(both):
        middle = F.build(split)
    mx, mw = at(F, alone, x), at(F, both, w)
    hidden = middle(at(F, alone, torch.sin)(mx))
    y = at(F, after, lambda h, v: (h @ v).tanh().sum())(hidden, mw)
    z = at(F, both, torch.sum)(at(F, alone, torch.exp)(hidden))
    (y.to_device(alone) + z.to_device(alone)).backward()
    full = down(nn.functional.gelu(up(torch.sin(px))))
    plain = (full @ pw).tanh().sum() + full.exp().sum()
    plain.backward()
    same(x.grad, px.grad, alone, rank)
    same(w.grad, pw.grad, both, rank)
    if rank < 2:
        mine = slice(4 * rank, 4 * rank + 4)
        torch.testing.assert_close(middle.module[0].weight.grad, up.weight.grad[mine])
        torch.testing.assert_close(middle.module[2].weight.grad, down.weight.grad[:, mine])
        torch.testing.assert_close(middle.module[2].bias.grad, down.bias.grad)
    torch.testing.assert_close(hidden.full(), full.detach())
    F.finish()


def devices_of_its_ranks() -> None:
    """A place of two ranks is on the device of each; so is a pipeline over places."""
    import torch
    from torch import nn

    from torchdistpackage.compat.placed import DeviceFunctor, PlacedPipeline

    F = DeviceFunctor(["cpu", "cpu:0"])
    own = torch.device(("cpu", "cpu:0")[F.program.rank])
    both = F.place([0, 1])
    assert both.device == own and both == F.allocate_device(2) != F.place(0)
    assert str(both) == "cpu, cpu:0 of ranks [0, 1]"
    with pytest.raises(PlacementError, match="rank 1 has no device cpu; it has cpu:0"):
        F.place([0, 1], "cpu")
    modules = [at(F, F.place(rank), nn.Linear(3, 3)) for rank in (0, 1)]
    pipe = PlacedPipeline(modules, loss=nn.functional.mse_loss, num_microbatches=2)
    assert pipe.pipeline.executor.clock.device == own
    F.finish()


def test_a_place_of_ranks_is_on_the_device_of_each(ranks):
    ranks(2).run(devices_of_its_ranks)


def test_a_place_may_be_a_tensor_parallel_group(ranks):
    ranks(3).run(tensor_parallel)


def overlapping() -> None:
    """Places that share some of their ranks; each gradient once on each rank."""

    from torchdistpackage.compat.placed import DeviceFunctor

    F = DeviceFunctor(["cpu"] * 4)
    places = [F.place(r) for r in ((0, 1), (1, 2), (3,), (0, 3, 2), 2, (2, 1, 0))]
    xs = [float64(2, 2) for _ in places]
    ps = [x.detach().clone().requires_grad_() for x in xs]
    values, plain = [at(F, p, x) for p, x in zip(places, xs, strict=True)], list(ps)
    for i in range(12):
        a, b = i % len(values), (2 * i + 1) % len(values)
        product = at(F, places[(5 * i + 2) % 6], lambda u, v: (u @ v).tanh())
        values.append(product(values[a], values[b]))
        plain.append((plain[a] @ plain[b]).tanh())
    total = at(F, places[1], lambda *v: sum(v).sum())(*values)
    total.backward()
    sum(plain).sum().backward()
    for x, p, place in zip(xs, ps, places, strict=True):
        same(x.grad, p.grad, place, F.program.rank)
    F.finish()


def test_places_may_share_ranks(ranks):
    ranks(4).run(overlapping)


def several_devices(devices: list, num: int) -> None:
    import torch

    from torchdistpackage.compat.placed import DeviceFunctor

    F = DeviceFunctor(devices)
    places = [F.allocate_device() for _ in range(num + 1)]
    assert len({id(p) for p in places}) == num and places[-1] is places[0]
    x = float64(3)
    px = x.detach().clone().requires_grad_()
    value, plain = at(F, places[0], x), px
    for place in places[1:]:
        value, plain = at(F, place, torch.sin)(value * 2), torch.sin(plain * 2)
    value.sum().backward()
    plain.sum().backward()
    same(x.grad, px.grad, places[0], F.program.rank)
    F.finish()


@pytest.mark.parametrize(
    ("num_ranks", "devices", "num"),
    [(2, [["cpu", "cpu"], ["cpu"]], 3), (2, ["cpu"] * 4, 4), (1, ["cpu"] * 3, 3)],
)
def test_a_rank_may_have_several_devices(ranks, num_ranks, devices, num):
    ranks(num_ranks).run(several_devices, devices, num)


def chain(order: tuple[int, ...], schedule: str) -> tuple:
    """Gradients of a pipeline over a placed chain, and of the placed program itself."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from torchdistpackage import simulate
    from torchdistpackage.compat.placed import DeviceFunctor, PlacedPipeline

    torch.set_default_dtype(torch.float64)
    F = DeviceFunctor(["cpu"] * dist.get_world_size())
    modules = []
    for rank in order:
        with F.under(F.place(rank)):
            modules.append(F(nn.Sequential(nn.Linear(5, 5), nn.Tanh())))
    first, last = F.place(order[0]), F.place(order[-1])
    loss_of = at(F, last, nn.functional.mse_loss)
    x, y = torch.randn(8, 5), torch.randn(8, 5)
    mx, my = at(F, first, x), at(F, last, y)
    value = mx
    for module in modules:
        value = module(value)
    loss = loss_of(value, my)
    loss.backward()
    expected = [[p.grad.clone() for p in m.parameters()] for m in modules]
    for module in modules:
        if module.is_here:
            module.zero_grad()
    pipe = PlacedPipeline(modules, loss=loss_of, schedule=schedule, num_microbatches=4)
    for targets, batch in ((my, mx), (y, x)):
        found = pipe.step(batch, targets=targets)
        assert (found is None) == (F.program.rank not in order)
        for module, grads in zip(modules, expected, strict=True):
            for p, g in zip(module.parameters(), grads, strict=False):
                torch.testing.assert_close(p.grad, g, rtol=1e-12, atol=1e-13)
            module.zero_grad()
    if found is not None:
        assert abs(found.item() - loss.item()) < 1e-12
    else:
        loss.item()
    both = at(F, F.place([0, 1]), torch.sin)
    with pytest.raises(PlacementError, match=r"ranks \[0, 1\].* one rank"):
        PlacedPipeline([both], num_microbatches=2)
    F.finish()
    timeline = simulate(pipe.schedule)
    return pipe.schedule.name, pipe.schedule.placement, round(timeline.bubble, 6)


@pytest.mark.parametrize(
    ("num", "order", "schedule", "name", "bubble"),
    [
        (3, (2, 0, 1), "1f1b", "1f1b", 2 / 6),
        pytest.param(3, (0, 2), "gpipe", "gpipe", 1 / 5, marks=pytest.mark.full),
        pytest.param(2, (1, 0, 1, 0), "interleaved", "interleaved", 1 / 9, marks=pytest.mark.full),
        pytest.param(3, (0, 1, 0), "1f1b", "1f1b~placed", None, marks=pytest.mark.full),
        pytest.param(2, (0, 0, 1), "1f1b", "1f1b", 1 / 5, marks=pytest.mark.full),
        pytest.param(3, (1, 1, 2, 2, 0, 0), "zb-h1", "zb-h1", None, marks=pytest.mark.full),
    ],
)
def test_a_chain_runs_as_a_pipeline_with_the_same_gradients(
    ranks, num, order, schedule, name, bubble
):
    results = ranks(num).run(chain, order, schedule)
    assert len(set(results)) == 1
    found, placement, simulated = results[0]
    assert found == name
    used = sorted(set(order))
    kept = [r for i, r in enumerate(order) if i == 0 or order[i - 1] != r]
    assert placement == tuple(used.index(r) for r in kept)
    assert bubble is None or simulated == pytest.approx(bubble, abs=1e-4)
