"""What backwards may be besides plain ones: asked for gradients in between, sparse, mixed.

Sparse gradients travel as rows, also where ranks disagree on what the gradient is.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchdistpackage.comm.flight_recorder import recorder
from torchdistpackage.ddp.naive_ddp import NaiveDDP
from torchdistpackage.errors import CommError

VOCAB, DIM = 50, 4


class Table(nn.Module):
    """mean of rows; `dense`: plus a use of the whole table, which makes its gradient dense."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.words = nn.Embedding(VOCAB, DIM, sparse=True, dtype=dtype)

    def forward(self, tokens: Tensor, dense: bool = False) -> Tensor:
        out = self.words(tokens).square().sum()
        return out + self.words.weight.sum() if dense else out


def tokens_of(rank: int, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(VOCAB, (3,), generator=draw)


def dense_on_one_rank() -> None:
    """In the steps in which rank 1 uses the whole table, the gradient is dense everywhere."""
    rank, size = dist.get_rank(), dist.get_world_size()
    net = Table()
    one = copy.deepcopy(net)
    ddp = NaiveDDP(net)
    one.load_state_dict(ddp.state_dict())
    for step, dense in enumerate([False, True, False]):
        ddp.zero_grad(), one.zero_grad()
        for r in range(size):
            (one(tokens_of(r, step), dense and r == 1) / size).backward()
        ddp(tokens_of(rank, step), dense and rank == 1).backward()
        mine, truth = net.words.weight.grad, one.words.weight.grad
        assert mine.is_sparse == (not dense)
        torch.testing.assert_close(mine.to_dense(), truth.to_dense(), rtol=1e-12, atol=1e-12)


def test_a_gradient_that_is_dense_on_one_rank_is_dense_on_all(ranks):
    ranks(3).run(dense_on_one_rank)


def only_rows_travel() -> None:
    sent: list[int] = []
    ddp = NaiveDDP(Table(torch.bfloat16))
    begin = recorder.begin

    def noted(operation: str, group: object, x: Tensor) -> object:
        sent.append(x.numel())
        return begin(operation, group, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "begin", noted)
        ddp(tokens_of(dist.get_rank(), 0)).backward()
    grad = ddp.module.words.weight.grad
    assert grad.is_sparse and grad.is_coalesced() and grad.dtype == torch.bfloat16
    assert max(sent) <= 3 * DIM, "a row for each lookup, and not the table"


def test_only_rows_and_their_numbers_travel(ranks):
    ranks(2).run(only_rows_travel)


def penalised(num_grad_acc_iter: int) -> None:
    """A gradient asked for inside the loss is no backward of its own: nothing leaves for it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1)).double()
    ddp, order = NaiveDDP(net, num_grad_acc_iter=num_grad_acc_iter), []
    ddp.reducer.on_launch = order.append
    for step in range(3):
        order.clear()
        for micro in range(num_grad_acc_iter):
            assert not order
            draw = torch.Generator().manual_seed(10 * step + micro + dist.get_rank())
            x = torch.randn(3, DIM, generator=draw, dtype=torch.float64, requires_grad=True)
            out = ddp(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (out.sum() + slope.square().sum()).backward()
        assert order == list(range(ddp.reducer.num_buckets))


@pytest.mark.parametrize("num_grad_acc_iter", [1, 2])
def test_a_gradient_penalty_reduces_once(ranks, num_grad_acc_iter):
    ranks(2).run(penalised, num_grad_acc_iter)


class Unannounced(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Parameter(torch.ones(VOCAB, DIM))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.words, sparse=True)


def unannounced() -> None:
    ddp = NaiveDDP(Unannounced())
    with pytest.raises(CommError, match=r"words has a sparse gradient.*sparse=False"):
        ddp(tokens_of(0, 0)).sum().backward()


def test_a_sparse_gradient_that_no_embedding_announced_is_refused_by_name(ranks):
    ranks(2).run(unannounced)


def asked_by_one_rank() -> None:
    """A slope by the inputs, inside `no_sync`, is nobody's backward."""
    torch.manual_seed(0)
    net = nn.Linear(DIM, 1).double()
    ddp, order = NaiveDDP(net, num_grad_acc_iter=2), []
    ddp.reducer.on_launch = order.append
    x = torch.ones(3, DIM, dtype=torch.float64, requires_grad=True)
    if dist.get_rank() == 0:
        with ddp.no_sync():
            torch.autograd.grad(ddp(x).sum(), x)
    ddp(x.detach()).sum().backward()
    assert not order and not net.weight.grad.ne(3).any()
    ddp(x.detach() * dist.get_rank()).sum().backward()
    assert order == [0] and not net.weight.grad.ne(4.5).any()


def test_a_slope_by_the_inputs_inside_no_sync_counts_as_no_backward(ranks):
    ranks(2).run(asked_by_one_rank)
