"""When a product's node sends, what it leaves for later, and gradients of its gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.each import each
from torchdistpackage.comm import collectives, primitives
from torchdistpackage.comm.group_state import state_of
from torchdistpackage.comm.tpc import tpc
from torchdistpackage.layout.mark import collect
from torchdistpackage.parallel.pipeline.split_backward import backward_input, backward_weight
from torchdistpackage.parallel.tensor import chunked, column_product, product_gradients
from torchdistpackage.parallel.tensor.attention import ParallelAttention
from torchdistpackage.parallel.tensor.init import Initial, initialize
from torchdistpackage.parallel.tensor.linear import ColumnLinear, RowLinear
from torchdistpackage.parallel.tensor.norm import LayerNorm

S, B, DIM = 8, 2, 12
MODES = ("", "sequence", "overlap")


def pair(mode: str, group=None) -> nn.Sequential:
    how = {"sequence_parallel": mode != "", "tp_comm_overlap": mode == "overlap"}
    how |= {"dtype": torch.float64, "group": group or tpc.get_group("tensor")}
    net = nn.Sequential(ColumnLinear(DIM, 10, **how), nn.Tanh(), RowLinear(10, DIM, **how))
    layouts = collect(net)
    initialize(net, layouts, tpc.topology.dense, tpc.rank, 7, dict.fromkeys(layouts, Initial()))
    return net


def rows_of(mode: str, x: torch.Tensor) -> torch.Tensor:
    if mode == "":
        return x
    size, rank = tpc.get_group("tensor").size(), tpc.get_group("tensor").rank()
    return x[S // size * rank : S // size * (rank + 1)]


def whole_input() -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    return torch.randn(S, B, DIM, dtype=torch.float64, generator=draw)


def num_calls() -> int:
    return state_of(tpc.get_group("tensor")).issued


def split(mode: str) -> None:
    """Input gradients first, weights later: the same numbers, and nothing is sent twice."""
    tpc.setup_process_groups([("tensor", 2)])
    with pytest.MonkeyPatch.context() as patch:
        for least in ("CHUNK_BYTES", "QUEUED_CHUNK_BYTES"):
            patch.setattr(chunked, least, 1)
        at_once, later = pair(mode), pair(mode)
        x = rows_of(mode, whole_input())
        xs = [x.clone().requires_grad_() for _ in range(2)]
        y = at_once(xs[0])
        before = num_calls()
        y.square().sum().backward()
        num_at_once = num_calls() - before
        y = later(xs[1])
        before = num_calls()
        deferred = backward_input([y], [2 * y.detach()], [xs[1]])
        assert {id(later[i].weight) for i in (0, 2)} <= deferred.parameters
        assert later[0].weight.grad is None
        backward_weight(deferred)
        assert num_calls() - before == num_at_once
    torch.testing.assert_close(xs[1].grad, xs[0].grad, rtol=1e-12, atol=1e-12)
    for one, other in zip(later.parameters(), at_once.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_a_split_backward_defers_the_weights_and_sends_once(ranks):
    ranks(2).run(each, split, [(mode,) for mode in MODES])


def twice(mode: str) -> None:
    """Gradients of the squared norm of the gradients, against one process."""
    tpc.setup_process_groups([("tensor", 2)])
    net, x = pair(mode), rows_of(mode, whole_input()).requires_grad_()
    (dx,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    dx.square().sum().backward()
    weights = {
        f"{index}.{name}": p.requires_grad_()
        for index in (0, 2)
        for name, p in net[index].to_full().items()
    }
    plain_x = whole_input().requires_grad_()
    hidden = torch.tanh(plain_x @ weights["0.weight"].t() + weights["0.bias"])
    y = hidden @ weights["2.weight"].t() + weights["2.bias"]
    (dx,) = torch.autograd.grad(y.square().sum(), plain_x, create_graph=True)
    dx.square().sum().backward()
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(x.grad, rows_of(mode, plain_x.grad), **close)
    rank = tpc.get_group("tensor").rank()
    first, second = weights["0.weight"].grad, weights["2.weight"].grad
    torch.testing.assert_close(net[0].weight.grad, first[5 * rank : 5 * rank + 5], **close)
    torch.testing.assert_close(net[2].weight.grad, second[:, 5 * rank : 5 * rank + 5], **close)


def test_gradients_of_gradients(ranks):
    ranks(2).run(each, twice, [(mode,) for mode in MODES])


def order(kind, mode: str) -> None:
    """The sum is under way while the weights' gradients are computed, and waited for after."""
    tpc.setup_process_groups([("tensor", 2)])
    seen: list[str] = []
    computed = product_gradients.weight_gradient

    def noted(*given):
        seen.append("weight")
        return computed(*given)

    class Noted(primitives.Work):
        def wait(self):
            seen.append("wait")
            return super().wait()

    with pytest.MonkeyPatch.context() as patch:
        for where in (column_product, product_gradients):
            patch.setattr(where, "weight_gradient", noted)
        patch.setattr("torchdistpackage.comm.work.Work", Noted)
        net = kind(DIM, 4) if kind is ParallelAttention else kind(DIM, 10)
        net = kind(DIM, 4, sequence_parallel=mode != "") if mode else net
        x = rows_of(mode, whole_input()).float().requires_grad_()
        y = net(x)
        seen.clear()
        y.sum().backward()
    assert seen[-1] == "wait"
    assert "weight" in seen[: seen.index("wait")]


def test_the_sum_of_the_input_gradient_runs_under_the_weight_gradient(ranks):
    cases = itertools.product((ColumnLinear, ParallelAttention), ("", "sequence"))
    ranks(2).run(each, order, list(cases))


def one_buffer() -> None:
    """The sum of a row product takes the memory of this rank's summand: no copy of it is made."""
    tpc.setup_process_groups([("tensor", 2)])
    row, x = RowLinear(64, 512, bias=False), torch.ones(128, 1, 32)
    made: list[torch.Tensor] = []

    def linear(*given):
        made.append(F.linear(*given))
        return made[-1]

    row.product = linear
    for is_trained in (True, False):
        with torch.set_grad_enabled(is_trained):
            y = row(x)
        assert y.data_ptr() == made[-1].data_ptr()
        torch.testing.assert_close(y, x.repeat(1, 1, 2) @ row.to_full()["weight"].t())


def test_a_row_product_copies_no_partial_sum(ranks):
    ranks(2).run(one_buffer)


def one_sum(how: str) -> None:
    """Of scale and shift together, norm by norm; and the numbers of one process."""
    tpc.setup_process_groups([("tensor", 2)])
    norms = [LayerNorm(DIM, sequence_parallel=True, dtype=torch.float64) for _ in range(3)]
    plain = [nn.LayerNorm(DIM, dtype=torch.float64) for _ in range(3)]

    def step(net, x):
        first, second, third = net
        x = x + torch.tanh(second(torch.tanh(first(x))))
        loss = third(x).square().sum() + x.sin().sum()
        parameters = [p for norm in net for p in (norm.weight, norm.bias)]
        if how in ("grad", "create_graph"):
            return torch.autograd.grad(loss, parameters, create_graph=how == "create_graph")
        for _ in range(2 if how == "twice" else 1):
            loss.backward(retain_graph=True)
        return [p.grad for p in parameters]

    before = num_calls()
    found = step(norms, rows_of("sequence", whole_input()))
    assert num_calls() - before == (6 if how == "twice" else 3)
    for one, other in zip(found, step(plain, whole_input()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_scale_and_shift_of_a_norm_are_summed_in_one_message(ranks):
    ways = ("backward", "twice", "grad", "create_graph")
    ranks(2).run(each, one_sum, [(how,) for how in ways])


def one_gather() -> None:
    tpc.setup_process_groups([("tensor", 2)])
    row = RowLinear(DIM, 10, sequence_parallel=True, dtype=torch.float64)
    y = row(whole_input()[..., :6].requires_grad_())
    before = num_calls()
    y.square().sum().backward()
    assert num_calls() - before == 1
    rows = collectives.gather(y.detach(), 0, "tensor")
    torch.testing.assert_close(row.bias.grad, 2 * rows.sum((0, 1)), rtol=1e-12, atol=1e-12)


def test_a_rows_bias_has_its_gradient_from_the_gathered_rows(ranks):
    ranks(2).run(one_gather)


def autocast_and_frozen(mode: str) -> None:
    """Under autocast products are bf16; a frozen weight gets no gradient, an input that needs none
    sends nothing back."""
    tpc.setup_process_groups([("tensor", 2)])
    net, x = pair(mode).float(), rows_of(mode, whole_input()).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(x)
    y.float().square().sum().backward()
    exact = pair(mode).float()
    plain = x.detach().clone().requires_grad_()
    exact(plain).square().sum().backward()
    assert net[0].weight.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, plain.grad, rtol=0.1, atol=1e-3)
    torch.testing.assert_close(net[0].weight.grad, exact[0].weight.grad, rtol=0.1, atol=1e-3)
    net.zero_grad()
    net[0].weight.requires_grad_(False)
    y = net(x.detach())
    before = num_calls()
    y.sum().backward()
    assert net[0].weight.grad is None and net[0].bias.grad is not None
    # the sequence-parallel row gathers its gradient and sums its bias', others send nothing
    assert (num_calls() - before == 0) is (mode == "")


def test_autocast_frozen_weights_and_inputs_without_gradient(ranks):
    ranks(2).run(each, autocast_and_frozen, [(mode,) for mode in MODES])
