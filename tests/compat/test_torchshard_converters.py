"""Torch models become split in place: values, hooks, ties, what is frozen and state dicts stay."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchdistpackage.compat.torchshard as ts
from tests.compat.sharded import close, start, whole
from torchdistpackage.errors import LayoutError


class Head(nn.Module):
    """A backbone that is data parallel and a head that is split by class."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 1)
        self.neck = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.fc = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.neck(self.conv(x).flatten(1))
        if isinstance(self.fc, ts.nn.ParallelLinear) and self.fc.dim is not None:
            x = ts.distributed.gather(x, dim=0)
        return self.fc(x)


def heads(size: int, dim: int | None) -> None:
    start(size)
    torch.manual_seed(2)
    plain = Head()
    ours = copy.deepcopy(plain)
    ours.fc.weight.requires_grad_(dim != 0)  # frozen stays frozen
    seen: list[str] = []
    ours.fc.register_forward_hook(lambda *_: seen.append("hook"))
    head, weight = ours.fc, ours.fc.weight
    assert ts.nn.ParallelLinear.convert_parallel_linear(ours.fc, dim) is not head
    assert type(head) is nn.Linear and tuple(head.weight.shape) == (10, 6)
    ours.neck[0].requires_grad_(True)
    fc = ours.fc
    ts.nn.ParallelLinear.convert_parallel_linear(fc_only := nn.ModuleDict({"fc": fc}), dim)
    assert fc_only["fc"] is head and head.weight is weight and type(head) is ts.nn.ParallelLinear
    names = ts.register_ddp_parameters_to_ignore(ours)
    expected_names = {None: [], 0: ["fc.weight"], 1: ["fc.weight", "fc.bias"]}[dim]
    assert names == expected_names == ours._ddp_params_and_buffers_to_ignore

    group = ts.distributed.get_group()
    wrapped = DistributedDataParallel(ours, process_group=group)
    full = torch.randn(4 * size, 3, 1, 1)
    target = torch.randint(10, (4 * size,))
    mine = full.chunk(size)[ts.distributed.get_rank()]
    logits = wrapped(mine)
    assert seen == ["hook"]
    expected = F.cross_entropy(plain(full), target)
    if dim is None:
        loss = F.cross_entropy(logits, target.chunk(size)[ts.distributed.get_rank()])
    else:
        loss = ts.nn.ParallelCrossEntropyLoss()(logits, target)
        close(loss, expected)
    expected.backward()
    loss.backward()
    if dim is not None:
        found = ours.fc.weight.grad
        assert (found is None) == (dim == 0)
        if found is not None:
            close(whole(found, 0), plain.fc.weight.grad)
        # gathering gave each rank the gradient of its own samples; DDP takes the mean
        close(ours.conv.weight.grad * size, plain.conv.weight.grad)
    else:
        close(ours.fc.weight.grad, plain.fc.weight.grad)

    for model in (wrapped, ours):
        for state in (wrapped.state_dict(), ours.state_dict()):
            collected = ts.collect_state_dict(model, state)
            assert list(collected) == list(state)
            assert [v.shape for v in collected.values()] == [
                v.shape for v in plain.state_dict().values()
            ]
            for name, value in collected.items():
                assert torch.equal(value, plain.state_dict()[name.removeprefix("module.")])
            again = ts.relocate_state_dict(model, collected)
            assert all(torch.equal(again[name], state[name]) for name in state)
    prefixed = copy.deepcopy(ts.collect_state_dict(ours, ours.state_dict(), prefix="model."))
    assert all(name.startswith("model.") for name in prefixed)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    ours.load_state_dict(ts.relocate_state_dict(ours, prefixed, prefix="model."))
    twin = copy.deepcopy(ours)
    assert ts.register_ddp_parameters_to_ignore(twin) == names
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            ts.collect_state_dict(twin, twin.state_dict()).values(),
            plain.state_dict().values(),
            strict=True,
        )
    )


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize(("world", "size"), [(2, 2), pytest.param(4, 2, marks=pytest.mark.full)])
def test_a_converted_head(ranks, world, size, dim):
    ranks(world).run(heads, size, dim)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.MultiheadAttention(6, 2))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight


def ties() -> None:
    start(2)
    ids = torch.randint(7, (3, 4))
    for first, dim, over in (("head", 1, 0), ("head", 0, 1), ("embed", 0, 0), ("embed", -1, 1)):
        plain = Tied()
        ours = copy.deepcopy(plain)
        optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
        ours.body[0].weight.register_hook(lambda g: g)
        if first == "head":
            ts.nn.ParallelLinear.convert_parallel_linear(ours, dim)
            assert type(ours.body[0]) is ts.nn.ParallelLinear
        else:
            ts.nn.ParallelEmbedding.convert_parallel_embedding(ours, dim)
            assert type(ours.body[0]) is nn.Linear
        assert type(ours.embed) is ts.nn.ParallelEmbedding
        assert type(ours.head) is ts.nn.ParallelLinear
        assert ours.head.weight is ours.embed.weight
        assert type(ours.body[1].out_proj) is not ts.nn.ParallelLinear
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in held} == {id(p) for p in ours.parameters()}
        logits = ours.head(ours.embed(ids))
        if ts.get_parallel_dim(logits) is not None:
            logits = ts.distributed.gather(logits)
        expected = plain.head(plain.embed(ids))
        close(logits, expected)
        factor = torch.randn(expected.shape)
        (expected * factor).sum().backward()
        (logits * factor).sum().backward()
        close(whole(ours.embed.weight.grad, over), plain.embed.weight.grad)
        state = ts.collect_state_dict(ours, ours.state_dict())
        assert torch.equal(state["head.weight"], plain.head.weight)
        assert torch.equal(state["embed.weight"], plain.embed.weight)

    shared = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Bilinear(6, 6, 1)})
    shared["b"].weight = shared["a"].weight
    with pytest.raises(LayoutError, match="b, a Bilinear, shares its weight"):
        ts.nn.ParallelLinear.convert_parallel_linear(shared, 1)
    assert type(shared["a"]) is nn.Linear
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)))
    with pytest.raises(LayoutError, match="0 has a parametrization"):
        ts.nn.ParallelLinear.convert_parallel_linear(normed, 1)
    for bad in (2, "1", True):
        with pytest.raises(ValueError, match="1 or -1 to split the outputs"):
            ts.nn.ParallelLinear(4, 4, dim=bad)


def test_ties_hooks_and_optimizers_stay(ranks):
    ranks(2).run(ties)


def again() -> None:
    start(2)
    convert = ts.nn.ParallelLinear.convert_parallel_linear
    model = nn.Sequential(nn.Linear(4, 4), ts.nn.ParallelLinear(4, 6, dim=0))
    convert(model, -1)  # what is split stays so among layers that are not
    assert [layer.dim for layer in model] == [-1, 0]
    first = model[:1]
    kept = first[0].weight.clone()
    convert(first, 1)  # the same once more
    assert torch.equal(first[0].weight, kept)
    for dim in (0, None):
        with pytest.raises(LayoutError, match=rf"along dim {dim}, and 0 has dim -1; a layer can"):
            convert(first, dim)
    assert first[0].dim == -1 and torch.equal(first[0].weight, kept)


def test_a_second_conversion_along_another_dim_is_refused(ranks):
    ranks(2).run(again)
