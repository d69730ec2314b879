"""torchshard's layers and blocks of them equal torch's own in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import torchdistpackage.compat.torchshard as ts
from tests.compat.sharded import by_world, close, start, whole


def linears(size: int) -> None:
    start(size)
    for din, dout in ((6, 8), (5, 7)):
        for dim in (None, 0, 1, -1):
            for bias in (True, False):
                torch.manual_seed(3)
                plain = nn.Linear(din, dout, bias=bias)
                torch.manual_seed(3)
                ours = ts.nn.ParallelLinear(din, dout, bias=bias, dim=dim)
                over = {None: None, 0: 1}.get(dim, 0)
                full = ours.weight if over is None else whole(ours.weight, over)
                assert torch.equal(full, plain.weight)  # bit for bit what torch draws
                assert ts.get_parallel_dim(ours.weight) == dim
                expected_mark = dim if dim in (1, -1) else None
                assert not bias or ts.get_parallel_dim(ours.bias) == expected_mark

                x = torch.randn(2, 3, din, requires_grad=True)
                y = x.detach().clone().requires_grad_()
                expected, found = plain(x), ours(y)
                assert getattr(found, ts._PARALLEL_DIM, None) == (-1 if over == 0 else None)
                if over == 0:
                    found = ts.distributed.gather(found)
                close(found, expected)
                factor = torch.randn(expected.shape)
                (expected * factor).sum().backward()
                (found * factor).sum().backward()
                close(y.grad, x.grad)
                grad = ours.weight.grad if over is None else whole(ours.weight.grad, over)
                close(grad, plain.weight.grad)
                if bias:
                    grad = whole(ours.bias.grad, 0) if over == 0 else ours.bias.grad
                    close(grad, plain.bias.grad)
                again = ts.nn.functional.parallel_linear(y, ours.weight, ours.bias, dim, dout)
                assert torch.equal(again, ours(y))
    assert repr(ts.nn.ParallelLinear(20, 30, dim=-1)) == (
        "ParallelLinear(in_features=20, out_features=30, bias=True, dim=-1)"
    )


@by_world
def test_linear_is_torchs(ranks, world, size):
    ranks(world).run(linears, size)


def stack(size: int) -> None:
    start(size)
    dims = [0, 0, 1, None, -1, 0, -1, 1, 0]
    plain, ours = nn.ModuleList(), nn.ModuleList()
    for i, dim in enumerate(dims):
        torch.manual_seed(i)
        plain.append(nn.Linear(*((6, 10), (10, 6))[i % 2]))
        torch.manual_seed(i)
        ours.append(ts.nn.ParallelLinear(*((6, 10), (10, 6))[i % 2], dim=dim))
    x = y = torch.randn(3, 6)
    for i, (theirs, mine) in enumerate(zip(plain, ours, strict=True)):
        x, y = theirs(x), mine(y)
        if getattr(y, ts._PARALLEL_DIM, None) in (-1, 1) and dims[i + 1 : i + 2] != [0]:
            y = ts.distributed.gather(y, dim=-1)
            setattr(y, ts._PARALLEL_DIM, "None")  # as users write it
    close(y, x)


def test_a_stack_of_all_kinds(ranks):
    ranks(2).run(stack, 2)


OPTIONS = [
    {},
    {"padding_idx": 0},
    {"padding_idx": -2},
    {"max_norm": 0.7},
    {"max_norm": 0.5, "norm_type": float("inf")},
    {"max_norm": 0.9, "norm_type": 1.0},
    {"scale_grad_by_freq": True},
    {"sparse": True},
    {"sparse": True, "padding_idx": 3, "max_norm": 1.0},
]


def embeddings(size: int) -> None:
    start(size)
    ids = torch.randint(7, (5, 4))
    ids[0] = torch.tensor([0, 5, 6, 0])
    for options in OPTIONS:
        for dim in (None, 0, 1, -1):
            torch.manual_seed(4)
            plain = nn.Embedding(7, 5, **options)
            torch.manual_seed(4)
            ours = ts.nn.ParallelEmbedding(7, 5, **options, dim=dim)
            over = {None: None, 0: 0}.get(dim, 1)
            assert torch.equal(
                ours.weight if over is None else whole(ours.weight, over), plain.weight
            )
            expected, found = plain(ids), ours(ids)
            close(found, expected)
            assert ts.get_parallel_dim(found) is None
            factor = torch.randn(expected.shape)
            (expected * factor).sum().backward()
            (found * factor).sum().backward()
            ours_grad, grad = ours.weight.grad.to_dense(), plain.weight.grad.to_dense()
            close(ours_grad if over is None else whole(ours_grad, over), grad)
            close(ours.weight if over is None else whole(ours.weight, over), plain.weight.detach())
            assert ours.weight.grad.is_sparse == plain.weight.grad.is_sparse
    given = torch.randn(7, 5)
    assert torch.equal(whole(ts.nn.ParallelEmbedding(7, 5, _weight=given, dim=0).weight, 0), given)
    for bad in (-8, 7):
        with pytest.raises(ValueError, match="outside the vocabulary of 7"):
            ts.nn.ParallelEmbedding(7, 5, padding_idx=bad)


@pytest.mark.few(1)
@by_world
def test_embedding_is_torchs(ranks, world, size):
    ranks(world).run(embeddings, size)


class Block(nn.Module):
    """Attention and a feed-forward; `linear` makes its four products."""

    def __init__(self, make, dropout: float = 0.0):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.kqv, self.out = make(8, 24, 1), make(8, 8, 0)
        self.mlp = nn.Sequential(make(8, 32, -1), nn.GELU(), nn.Dropout(dropout), make(32, 8, 0))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        mixed = self.kqv(self.ln1(x)).view(batch, length, -1, 6)  # heads of width 2: k, q, v
        k, q, v = (t.transpose(1, 2) for t in ts.slice(mixed, 3, dim=-1, contiguous=True))
        scores = (q @ k.transpose(-2, -1)) * 2**-0.5
        mask = torch.ones(length, length).tril().view(1, 1, length, length)
        weights = F.softmax(scores.masked_fill(mask == 0, -torch.inf), dim=-1)
        y = (weights @ v).transpose(1, 2).contiguous().view(batch, length, -1)
        x = x + self.out(y)
        return x + self.mlp(self.ln2(x))


def blocks(size: int) -> None:
    start(size)
    torch.manual_seed(11)
    plain = Block(lambda i, o, _: nn.Linear(i, o))
    torch.manual_seed(11)
    ours = Block(lambda i, o, dim: ts.nn.ParallelLinear(i, o, dim=dim))
    x, target = torch.randn(2, 3, 8), torch.randint(8, (6,))
    expected = F.cross_entropy(plain(x).view(6, 8), target)
    found = ts.nn.ParallelCrossEntropyLoss()(ours(x).view(6, 8), target)
    close(found, expected)
    expected.backward()
    found.backward()
    for (name, theirs), mine in zip(plain.named_parameters(), ours.parameters(), strict=True):
        dim = ts.get_parallel_dim(mine)
        grad = mine.grad if dim is None else whole(mine.grad, 0 if dim in (1, -1) else 1)
        torch.testing.assert_close(grad, theirs.grad, msg=name)
    # dropout draws for each rank's own part
    drawn = [torch.empty(0)] * size
    seen = ts.distributed.scatter(torch.ones(4, 8 * size))
    dropped = F.dropout(seen, 0.5)
    assert ts.get_parallel_dim(dropped) == -1
    dist.all_gather_object(drawn, ts.distributed.gather(dropped), group=ts.distributed.get_group())
    parts = drawn[0].chunk(size, 1)
    assert size == 1 or not torch.equal(parts[0], parts[1])


@by_world
def test_a_block_is_torchs(ranks, world, size):
    ranks(world).run(blocks, size)
