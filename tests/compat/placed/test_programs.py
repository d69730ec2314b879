"""What a placed program may do with its tensors: each case gives what plain torch gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from torchdistpackage.errors import PlacementError


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    logits: Any
    hidden: Any


def functor():
    """(F, three places on the ranks there are, this rank)."""
    import torch.distributed as dist

    from torchdistpackage.compat.placed import DeviceFunctor

    F = DeviceFunctor(["cpu"] * dist.get_world_size())
    return F, [F.allocate_device() for _ in range(3)], dist.get_rank()


def at(F, place, obj, **options):
    with F.under(place):
        return F(obj, **options)


def float64(*shape, grad=True):
    import torch

    return torch.randn(*shape, dtype=torch.float64).requires_grad_(grad)


def same(mine, plain, place, rank):
    """A gradient where its tensor lives, and nowhere else."""
    import torch

    if rank in place.ranks:
        torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)
    else:
        assert mine is None


def arguments() -> None:
    """Nested, by keyword, several outputs; the same function in plain torch."""
    import torch

    F, (a, b, c), rank = functor()
    x, y = float64(3, 4), float64(3, 4)
    px, py = (t.detach().clone().requires_grad_() for t in (x, y))
    mx, my = at(F, a, x), at(F, b, y)

    def mix(parts, scale, *, more, flag=None):
        (first, second), d = parts["xy"], more.hidden
        assert flag is None and scale == 3 and parts["n"] == "name"
        return Pair(first * scale + second, {"out": [second.t() * d, 7, None]})

    one = at(F, c, mix)(
        {"xy": (mx, my), "n": "name"}, 3, more=Output(None, at(F, b, torch.sin)(mx).sum())
    )
    plain = mix({"xy": (px, py), "n": "name"}, 3, more=Output(None, torch.sin(px).sum()))
    first, second = one
    deep = second["out"][0]
    assert len(one) == 2 and second.keys() == ["out"] and len(second["out"]) == 3
    assert second["out"][1].item() == 7 and second["out"][-1].full() is None
    # a whole structure to another place
    total = at(F, a, lambda o: o[0].sum() + (o[1]["out"][0] ** 2).sum())(one)
    expected = plain.first.sum() + (plain.second["out"][0] ** 2).sum()
    (total + at(F, a, torch.sum)(deep.to_device(a))).backward()
    (expected + plain.second["out"][0].sum()).backward()
    torch.testing.assert_close(total.full(), expected.detach())
    torch.testing.assert_close(first.full(), plain.first.detach())
    same(x.grad, px.grad, a, rank)
    same(y.grad, py.grad, b, rank)
    out = at(F, b, lambda t: Output(t * 2, hidden=[t]))(mx)
    torch.testing.assert_close(out["logits"].full(), px.detach() * 2)
    F.finish()


def dtypes_and_strides() -> None:
    import torch

    F, (a, b, _), rank = functor()
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
    kinds += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    kinds += [torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2]
    for kind in kinds:
        base = (torch.arange(24).reshape(4, 6) % 5).to(torch.float32).to(kind)
        views = [base, base.t(), base[1:, ::2], base[:0], base[0, 0], base[:1].expand(3, 6)]
        views += [base.conj()] if kind.is_complex else []
        for view in views:
            moved = at(F, b, lambda t: t)(at(F, a, view)).full()
            assert moved.dtype is kind and moved.shape == view.shape
            as_bytes = kind.itemsize == 1 and kind.is_floating_point
            compared = (moved.float(), view.float()) if as_bytes else (moved, view)
            assert torch.equal(*(t.resolve_conj() for t in compared)), (kind, view.shape)
    for kind in kinds[:4]:
        x = torch.ones(2, 3, dtype=torch.float32).to(kind).requires_grad_()
        # the gradient that goes back is not contiguous
        y = at(F, b, lambda t: (t.t() * torch.arange(6).reshape(3, 2).to(t.dtype)).sum())(
            at(F, a, x)
        )
        (y.to_device(a) * 1).backward()
        expected = torch.arange(6).reshape(3, 2).t().to(kind)
        assert (x.grad is None) == (rank not in a.ranks)
        assert x.grad is None or torch.equal(x.grad, expected)
    z = torch.ones(2, 3, dtype=torch.complex128).requires_grad_()
    at(F, b, lambda t: (t.conj() * (1 + 2j)).abs().sum())(at(F, a, z)).backward()
    pz = torch.ones(2, 3, dtype=torch.complex128).requires_grad_()
    (pz.conj() * (1 + 2j)).abs().sum().backward()
    same(z.grad, pz.grad, a, rank)
    F.finish()


def gradients_given() -> None:
    """backward(gradient, retain_graph), twice; several losses; a graph that is gone."""
    import torch

    F, (a, b, c), rank = functor()
    x, w = float64(3, 4), float64(4, 4)
    px, pw = (t.detach().clone().requires_grad_() for t in (x, w))
    y = at(F, c, torch.matmul)(at(F, a, x), at(F, b, w))
    plain = px @ pw
    gradient = float64(3, 4, grad=False)
    y.backward(gradient, retain_graph=True)
    y.backward(gradient=at(F, a, gradient * 2), retain_graph=True)
    plain.backward(3 * gradient, retain_graph=True)
    z, pz = at(F, b, lambda t: t.tanh().sum())(y), plain.tanh().sum()
    z.backward()
    pz.backward()
    same(x.grad, px.grad, a, rank)
    same(w.grad, pw.grad, b, rank)
    with pytest.raises(PlacementError, match="Cannot call backward on a leaf tensor"):
        at(F, a, x).backward()
    F.finish()


def without_gradients() -> None:
    """no_grad, integers, detached uses, data that wants none: no gradient travels for them."""
    import torch

    F, (a, b, c), rank = functor()
    x, data = float64(5, 3), float64(5, 3, grad=False)
    px = x.detach().clone().requires_grad_()
    mx, labels = at(F, a, x), at(F, b, torch.tensor([0, 1, 2, 1, 0]))
    posted = [] if F.program.mail is None else F.program.mail.posted
    if F.program.mail is not None:
        posted = F.program.mail.posted = []
    with torch.no_grad():
        quiet = at(F, c, lambda t: t * 2)(mx)
    loss = at(F, c, torch.nn.functional.cross_entropy)(mx, labels)
    mixed = at(F, c, lambda m, u, i: m + (u.detach() ** 2).sum() + i.argmax())(
        loss, at(F, b, lambda t: t * 3)(mx), quiet
    )
    also = at(F, c, lambda m, d: m * d.mean())(mixed, at(F, b, data))
    also.backward()
    plain = torch.nn.functional.cross_entropy(px, torch.tensor([0, 1, 2, 1, 0]))
    plain = plain + (px.detach() * 3).pow(2).sum() + (px * 2).argmax()
    (plain * data.mean()).backward()
    same(x.grad, px.grad, a, rank)
    with (
        pytest.raises(RuntimeError, match="does not require grad")
        if rank in c.ranks
        else _nothing()
    ):
        quiet.backward()
    back = [m for m in posted if m[0] == "send gradients"]
    sends = {peer for _, _, peer in back}
    assert sends <= set(a.ranks) | set(b.ranks)
    # what is used detached is sent as wanting a gradient, and comes back as none
    detached = mx.detach()
    (at(F, c, lambda d, t: (d * t).sum())(detached, mx)).backward()
    (px.detach() * px).sum().backward()
    same(x.grad, px.grad, a, rank)
    F.finish()


def _nothing():
    import contextlib

    return contextlib.nullcontext()


def in_place() -> None:
    """An operation may write to its argument; nobody may read what that was."""
    import torch

    F, (a, _, _), rank = functor()
    x = float64(4, 4)
    px = x.detach().clone().requires_grad_()
    h = at(F, a, lambda t: t * 2)(at(F, a, x))
    y = at(F, a, torch.nn.ReLU(inplace=True))(h)
    y.sum().backward()
    torch.relu(px * 2).sum().backward()
    same(x.grad, px.grad, a, rank)
    if rank in a.ranks:
        with pytest.raises(
            PlacementError, match=r"changed in place.*read the output of the latter"
        ):
            at(F, a, torch.sum)(h)
    else:
        at(F, a, torch.sum)(h)
    # what autograd has saved for its backward is known to have changed
    s = at(F, a, torch.sigmoid)(at(F, a, x))
    t = at(F, a, lambda v: v.mul_(2).sum())(s)
    with (
        pytest.raises(RuntimeError, match="modified by an inplace")
        if rank in a.ranks
        else _nothing()
    ):
        t.backward()
    # a send leaves with what the tensor was
    for _ in range(3):
        w = at(F, a, torch.ones(50_000))
        far = at(F, functor()[1][1], lambda v: v.sum())(w)
        if rank in a.ranks:
            w.tensor.fill_(5)
        assert far.item() == 50_000
    F.finish()


def operators() -> None:
    """Python's operators and torch's functions, on the place of what they take."""
    import torch

    F, (a, b, _), rank = functor()
    x = float64(3, 3)
    px = x.detach().clone().requires_grad_()
    m = at(F, a, x)
    y = ((2 * m - 1) / 3 + m @ m - m**2)[1:, 0]
    torch.sum(torch.cat([y, -y * 2])).backward()
    p = ((2 * px - 1) / 3 + px @ px - px**2)[1:, 0]
    torch.cat([p, -p * 2]).sum().backward()
    same(x.grad, px.grad, a, rank)
    values, indices = torch.max(m, 1)
    assert torch.equal(indices.full(), px.max(1).indices)
    assert [float(torch.sum(row)) for row in m] == pytest.approx(px.sum(1).tolist())
    assert len(m) == 3 and abs(float(values[0]) - float(px.detach()[0].max())) < 1e-12
    with pytest.raises(PlacementError, match=r"`if x.item\(\):`"):
        bool(m)
    if a != b:
        with pytest.raises(PlacementError, match=r"add mixes tensors on .*with F.under\(place\)"):
            m + at(F, b, x)
    F.finish()


def ahead() -> None:
    """What another rank waits for leaves before what is called first, and nothing else changes."""
    import torch

    F, (a, b, _), rank = functor()
    order = []
    x = float64(3)
    px = x.detach().clone().requires_grad_()

    def slow(t):
        order.append("ran" if posted else "ran first")
        return t.sin()

    posted = [] if F.program.mail is None else F.program.mail.posted
    if F.program.mail is not None:
        posted = F.program.mail.posted = []
    mx = at(F, a, x)
    with F.ahead():
        near = at(F, a, slow)(mx)
        far = at(F, b, torch.cos)(mx)
        with torch.no_grad():
            quiet = at(F, a, torch.exp)(far)
        both = at(F, a, lambda u, v, w: (u * v).sum() + w.sum())(near, far, quiet)
        assert not order
    if rank in a.ranks:
        assert order == ["ran first" if a == b else "ran"]
    both.backward()
    ((px.sin() * px.cos()).sum() + px.cos().exp().sum().detach()).backward()
    same(x.grad, px.grad, a, rank)
    with F.ahead():
        more = at(F, a, lambda t: t * 2)(mx)
        torch.testing.assert_close(more.full(), px.detach() * 2)  # asked for: it runs
        more = at(F, b, lambda t: t + 1)(more)
        more.sum().backward()
    (px * 2).sum().backward()
    same(x.grad, px.grad, a, rank)
    data = at(F, a, torch.ones(3))
    changes = pytest.raises(PlacementError, match="changed in place after")
    if a != b and rank in a.ranks:
        with changes, F.ahead():
            at(F, a, lambda t: t.add_(1))(data)
            at(F, b, torch.neg)(data)
    else:
        at(F, a, lambda t: t.add_(1))(data)
        at(F, b, torch.neg)(data)
    F.finish()


def needed_first() -> None:
    """In a backward what another rank waits for is computed before what nobody waits for."""
    import torch

    F, (a, b, _), rank = functor()
    seen = []

    def noted(name):
        def function(t):
            t.register_hook(lambda g: seen.append(name))
            return t * 2

        return function

    x = float64(3)
    mx = at(F, a, x)
    far = at(F, b, torch.sin)(mx)
    small = at(F, a, noted("needed"))(far)
    large = at(F, a, noted("later"))(at(F, a, noted("last"))(mx))  # called after it
    at(F, a, lambda u, v: (u * v).sum())(small, large).backward()
    px = x.detach().clone().requires_grad_()
    (px.sin() * 2 * px * 4).sum().backward()
    same(x.grad, px.grad, a, rank)
    if rank in a.ranks and a != b:
        assert seen == ["needed", "later", "last"]
    F.finish()


BODIES = [
    arguments, dtypes_and_strides, gradients_given, without_gradients,
    in_place, operators, ahead, needed_first,
]  # fmt: skip


@pytest.mark.parametrize("num", [3, pytest.param(1, marks=pytest.mark.full),
                                 pytest.param(2, marks=pytest.mark.full)])  # fmt: skip
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_placed_program_does_what_plain_torch_does(ranks, num, body):
    ranks(num).run(body)
