"""The mark of a split activation follows operations that leave the split dim alone; others are
refused by name.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torchdistpackage.compat.torchshard as ts
from tests.compat.sharded import close, start
from tests.tells import facts_pattern
from torchdistpackage.errors import LayoutError

FOLLOWED = {
    "relu": lambda x: x.relu(),
    "in place": lambda x: x.clone().mul_(2).add_(x),
    "with a number": lambda x: (3 - x) / 2 + x**2,
    "with a row of one": lambda x: x * torch.arange(1.0, 5).view(4, 1, 1),
    "where": lambda x: torch.where(x > 0, x, -x),
    "clamp": lambda x: x.clamp(min=0.2),
    "to": lambda x: x.float().double(),
    "flatten first": lambda x: x.flatten(0, 1),
    "view in": lambda x: x.view(4, 3, -1, 2),
    "view out": lambda x: x.view(4, 3, -1, 2).permute(2, 0, 1, 3).contiguous().view(-1, 3, 2),
    "view back": lambda x: x.view(4, 3, -1, 2).reshape(12, -1),
    "view of one head by numbers": lambda x: x.view(4, 3, x.shape[-1] // 4, 4).split(2, -1)[0],
    "view of one head by -1": lambda x: x.view((4, 3, -1, 4)).transpose(1, 2).softmax(-1),
    "unflatten one head": lambda x: x.unflatten(-1, (-1, 4)).softmax(-1),
    "view of one head and back": lambda x: x.view(4, 3, x.shape[-1] // 4, 4).tanh().flatten(2),
    "view behind a new dim": lambda x: x[:, 0].view(4, 1, x.shape[-1]) * torch.ones(3, 1) + x,
    "view behind a new dim by -1": lambda x: x[:, 0].reshape(4, 1, -1) + x,
    "transpose": lambda x: x.transpose(-1, 0),
    "permute": lambda x: x.permute(2, 0, 1),
    "t": lambda x: x[0].t(),
    "mT": lambda x: x.mT,
    "unsqueeze": lambda x: x.unsqueeze(0).unsqueeze(-1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "expand": lambda x: x[:1].expand(5, -1, -1),
    "index": lambda x: x[1:, 0],
    "index with dots": lambda x: x[..., None, :],
    "mask": lambda x: x[torch.tensor([True, False, True, True])],
    "rows": lambda x: x[torch.tensor([[0, 1], [2, 3]])],
    "softmax elsewhere": lambda x: x.softmax(0),
    "sum elsewhere": lambda x: x.sum(0),
    "mean of two": lambda x: x.mean((0, 1), keepdim=True),
    "max elsewhere": lambda x: x.max(1).values,
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, -x], 0),
    "split": lambda x: x.split(2, 0)[1],
    "unbind": lambda x: x.unbind(0)[2],
    "topk": lambda x: x.topk(2, 1).values,
    "linear elsewhere": lambda x: F.linear(x.transpose(1, 2), torch.ones(2, 3)),
    "layer norm elsewhere": lambda x: F.layer_norm(x.transpose(0, 2), (3, 4)),
    "rows of a product": lambda x: x.transpose(1, 2) @ torch.ones(3, 2),
    "columns of a product": lambda x: torch.ones(2, 3) @ x,
    "batches of a product": lambda x: x.permute(2, 0, 1) @ x.permute(2, 1, 0),
    "attention": lambda x: F.scaled_dot_product_attention(
        *(x.view(4, 3, -1, 2).transpose(1, 2) * f for f in (1, 2, 3)), is_causal=True
    ),
}

REFUSED = {
    "sum": lambda x: x.sum(),
    "softmax": lambda x: x.softmax(-1),
    "mean": lambda x: x.mean(-1),
    "cumsum": lambda x: x.cumsum(2),
    "flip": lambda x: x.flip(2),
    "split": lambda x: x.split(2, -1),
    "cat": lambda x: torch.cat([x, x], -1),
    "reshape": lambda x: x.transpose(1, 2).reshape(4, -1).view(2, 2, -1).flatten(1, 2)[:, None] + x,
    "flatten": lambda x: x.flatten(1),
    "view": lambda x: x.view(-1),
    "squeeze": lambda x: x[..., :1],
    "getitem": lambda x: x[..., 0],
    "linear": lambda x: F.linear(x, torch.ones(2, x.shape[-1])),
    "matmul": lambda x: x @ torch.ones(x.shape[-1], 2),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "conv1d": lambda x: F.conv1d(x, torch.ones(1, 3, 1)),
    "einsum": lambda x: torch.einsum("abc,abc->ab", x, x),
    "argmax": lambda x: x.argmax(-1),
    "nll_loss": lambda x: F.nll_loss(x[0], torch.zeros(3).long()),
    "parallel_linear": lambda x: ts.nn.ParallelLinear(8, 8, dim=1)(x),
}


def followed() -> None:
    start(2)
    x = torch.randn(4, 3, 8)
    for name, operation in FOLLOWED.items():
        a, b = (x.clone().requires_grad_() for _ in range(2))
        expected, part = operation(a), operation(ts.distributed.scatter(b))
        assert ts.get_parallel_dim(part) == -1, name
        from torchdistpackage.compat.torchshard.cuts import cut_of

        cut = cut_of(part)
        assert cut is not None and cut.length == expected.shape[cut.dim], name
        found = ts.distributed.gather(part, cut.dim)
        close(found, expected)
        factor = torch.randn(expected.shape)
        (expected * factor).sum().backward()
        (found * factor).sum().backward()
        torch.testing.assert_close(b.grad, a.grad, msg=name)
    for name, operation in REFUSED.items():
        with pytest.raises(LayoutError, match=r"split|gather"):
            operation(ts.distributed.scatter(x.clone().requires_grad_()))
            raise AssertionError(name)
    one_head = ts.distributed.scatter(x).view(4, 3, 1, 4)
    assert torch.equal(ts.distributed.gather(one_head, -1), x.view(4, 3, 1, 8))  # or features
    assert torch.equal(ts.distributed.gather(one_head, 2), x.view(4, 3, 2, 4))
    second = ts.distributed.scatter(torch.ones(2, 4, 3), 1)  # here 1 is not the last dim
    assert second.sum(2).shape == (2, 2)
    with pytest.raises(LayoutError, match=facts_pattern("dim 1", "holds 2", "4")):
        second.sum(1)
    part = ts.distributed.scatter(x)
    for number in (part.mean, part.tolist, part.numpy):
        with pytest.raises(LayoutError, match="this rank holds"):
            number()
    assert torch.equal(part, part.clone()) and len(part) == 4 and repr(part)
    twin = copy.deepcopy(part)
    part[0] = 1  # elsewhere
    assert torch.equal(ts.distributed.gather(twin, -1), x)
    leaf = copy.deepcopy(twin.requires_grad_())
    assert leaf.is_leaf and leaf.requires_grad and ts.get_parallel_dim(leaf) == -1
    ts.register_parallel_dim(part, None)
    assert type(part) is Tensor and ts.get_parallel_dim(part) is None and part.sum() is not None
    module = ts.nn.RegisterParallelDim(-1)
    assert repr(module) == "RegisterParallelDim(dim=-1)"
    pair = module([torch.ones(2), torch.ones(3)])
    assert [ts.get_parallel_dim(t) for t in pair] == [-1, -1]
    with pytest.raises(ValueError, match="a list of tensors, got a int"):
        module(3)


def test_the_mark_follows_and_refuses(ranks):
    ranks(2).run(followed)
