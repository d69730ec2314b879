"""Whatever tensor comes in: any dtype, empty, conjugated, expanded, with or without gradient."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.comm.collective_cases import OPERATIONS, Case, cases, draw, my_group, world_of
from tests.each import each
from torchdistpackage.comm import collectives as c
from torchdistpackage.errors import CommError

LAYOUT = "pairs"
SUMS = ("reduce", "reduce_scatter")
NUMBERS = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.complex64),
)


def of_dtype(case: Case, index: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    return (case.draw(index).abs() * 2).round().to(dtype)


def any_dtype(name: str, in_turn: bool) -> None:
    """In every case, or in turn: each dtype in one case, the next dtype in the next case."""
    group = my_group(LAYOUT)
    n, index = group.size(), group.rank()
    every = list(cases(name, n))
    for number, dtype in enumerate(NUMBERS):
        for case in [every[number % len(every)]] if in_turn else every:
            xs = [of_dtype(case, i, dtype) for i in range(n)]
            out = case.call(xs[index], group)
            assert out.dtype == dtype and out.grad_fn is None
            assert torch.equal(out, case.plain(xs, index)), (case, dtype)
            if dtype is torch.bool:
                assert out.view(torch.uint8).max() <= 1, "a byte that is no boolean"


@pytest.mark.parametrize("in_turn", [True, pytest.param(False, marks=pytest.mark.full)])
def test_integers_booleans_and_narrow_floats_are_exact(ranks, in_turn):
    ranks(world_of(LAYOUT)).run(each, any_dtype, [(name, in_turn) for name in OPERATIONS])


def only_moved() -> None:
    group = my_group(LAYOUT)
    for dtype in (torch.float8_e4m3fn, torch.uint16):
        xs = [torch.arange(4.0).add(i).to(dtype) for i in range(2)]
        whole = torch.cat([x.float() for x in xs])
        assert torch.equal(c.gather(xs[group.rank()], 0, group).float(), whole)
        assert torch.equal(c.broadcast(xs[group.rank()], group).float(), xs[0].float())
        received = c.all_to_all(xs[group.rank()], 0, 0, group).float()
        assert torch.equal(received, torch.cat([x.float().chunk(2)[group.rank()] for x in xs]))
    with pytest.raises(CommError, match="float8_e4m3fn cannot be"):
        c.reduce(torch.ones(2).to(torch.float8_e4m3fn), group)


def test_dtypes_without_sums_can_be_moved(ranks):
    ranks(world_of(LAYOUT)).run(only_moved)


def nothing_in_it(name: str) -> None:
    group = my_group(LAYOUT)
    index = group.rank()
    for case in cases(name, group.size()):
        for empty in range(3):
            if case.uneven and empty in [dim % 3 for dim in case.dims]:
                continue
            xs = []
            for i in range(group.size()):
                shape = list(case.shape(i))
                shape[empty] = 0
                xs.append(torch.zeros(shape, dtype=torch.float64, requires_grad=i == index))
            out = case.call(xs[index], group)
            assert out.shape == case.plain(xs, index).shape if not case.cuts else not out.numel()
            out.sum().backward()
            assert xs[index].grad.shape == xs[index].shape


def test_empty_tensors_keep_their_shapes(ranks):
    ranks(world_of(LAYOUT)).run(each, nothing_in_it, [(name,) for name in OPERATIONS])


def all_in_one_part() -> None:
    """Everything on the last rank, also in the backward."""
    group = my_group(LAYOUT)
    last = group.rank() == 1
    x = draw((5 if last else 0, 2), 0).requires_grad_()
    whole = c.all_gather(x, 0, group, sizes=(0, 5))
    assert torch.equal(whole, draw((5, 2), 0))
    mine = c.reduce_scatter(whole, 0, group, sizes=(5, 0))
    mine.sum().backward()
    assert mine.shape == (0 if last else 5, 2)
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_a_rank_may_hold_nothing(ranks):
    ranks(world_of(LAYOUT)).run(all_in_one_part)


def lazy_views(name: str) -> None:
    group = my_group(LAYOUT)
    n, index = group.size(), group.rank()
    for case in cases(name, n):
        for view in (torch.conj, lambda x: x.conj().imag):
            xs = [view(case.draw(i, dtype=torch.complex128)) for i in range(n)]
            out, plain = case.call(xs[index], group), case.plain(xs, index)
            assert torch.equal(out.resolve_conj().resolve_neg(), plain.resolve_conj()), case


def test_what_is_conjugated_or_negated_only_on_paper_arrives_so(ranks):
    ranks(world_of(LAYOUT)).run(each, lazy_views, [(name,) for name in OPERATIONS])


def no_dims() -> None:
    group, rank = my_group(LAYOUT), dist.get_rank()
    x = torch.tensor(float(rank), dtype=torch.float64, requires_grad=True)
    total = c.reduce(c.copy(x, group), group)
    assert total.shape == () and total.item() == sum(dist.get_process_group_ranks(group))
    first = c.broadcast(x, group)
    assert first.item() == dist.get_global_rank(group, 0)
    (total + first).backward()
    assert float(x.grad) == 2 + (2 if group.rank() == 0 else 0)


def test_single_numbers_pass_where_no_dim_is_needed(ranks):
    ranks(world_of(LAYOUT)).run(no_dims)


def shared_gradient_is_not_written() -> None:
    """copy(h) + h: the incoming gradient is one expanded tensor for both uses."""
    h = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (c.copy(h, dist.group.WORLD) + h).sum().backward()
    assert torch.equal(h.grad, torch.full((3,), dist.get_world_size() + 1.0, dtype=torch.float64))


def test_an_incoming_gradient_is_never_reduced_in_place(ranks):
    ranks(2).run(shared_gradient_is_not_written)


def output_is_a_tensor_of_its_own(name: str) -> None:
    group = my_group(LAYOUT)
    for case in cases(name, group.size()):
        x = case.draw(group.rank())
        before = x.clone()
        case.call(x, group).add_(1)
        assert torch.equal(x, before), case


def test_writing_to_the_output_leaves_the_input(ranks):
    names = [(name,) for name in OPERATIONS if name != "copy"]
    ranks(world_of(LAYOUT)).run(each, output_is_a_tensor_of_its_own, names)


def only_where_a_gradient_is_needed(name: str) -> None:
    group = my_group(LAYOUT)
    case = cases(name, group.size())[-1]
    x = case.draw(group.rank())
    assert case.call(x, group).grad_fn is None
    with torch.no_grad():
        assert not case.call(x.requires_grad_(), group).requires_grad
    with torch.inference_mode():
        case.call(case.draw(group.rank()), group)
    plain = case.call(x, group)
    gradient = torch.autograd.grad(plain.square().sum(), x)[0]
    for reentrant in (False, True):
        again = checkpoint(case.call, x, group, use_reentrant=reentrant)
        assert torch.equal(again, plain)
        x.grad = None
        again.square().sum().backward()
        assert torch.equal(x.grad, gradient)


def test_with_and_without_autograd_and_under_checkpointing(ranks):
    ranks(world_of(LAYOUT)).run(
        each, only_where_a_gradient_is_needed, [(name,) for name in OPERATIONS]
    )


def alone() -> None:
    group = my_group("three") if dist.get_rank() == 0 else None
    for name in OPERATIONS if group is not None else ():
        case = cases(name, 1)[-1]
        x = case.draw(0)
        assert case.call(x, group) is x


def test_a_group_of_one_gives_its_input_back(ranks):
    ranks(1).run(alone)
