"""torchshard's own suite case by case: its 17 tests, each with one here, on groups of two.

| its file, case | here |
|---|---|
| test_cross_entropy: test_naive_cross_entropy | naive_cross_entropy |
| test_layers: test_naive_col_parallel_linear | col_gradients |
| test_layers: test_naive_row_parallel_linear | row_gradients |
| test_layers: test_naive_parallel_embedding | embedding_gradients |
| test_modules: test_parallel_self_attention | attention |
| test_modules: test_parallel_mlp | converted_mlp |
| test_modules: test_parallel_transformer_block | transformer_block |
| test_nn: test_parallel_cross_entropy | column_layer_and_loss |
| test_nn: test_parallel_cross_entropy_within_ddp_mode | whole_head_in_ddp |
| test_nn: test_parallel_cross_entropy_within_ddp_mode_and_row_parallel | row_head_in_ddp |
| test_nn: test_parallel_cross_entropy_within_ddp_mode_and_col_parallel | col_head_in_ddp |
| test_nn: test_parallel_linear_stack | linear_stack |
| test_nn: test_raw_parallel_linear | raw_initial_values |
| test_nn: test_row_parallel_linear | row_initial_values |
| test_nn: test_col_parallel_linear | col_initial_values |
| test_serialization: test_0_save_model_state_dict | saved_state |
| test_serialization: test_1_load_model_state_dict | loaded_state |

Theirs pass over these names too, on two ranks, by all three reductions, where numbers are float64
and one line is mended (`view_as` of a loss that is one number). In float32 two of them ask for
1e-6 where sums round to 1.9e-6, with the original too. On four ranks in groups of two, four cannot
be right as written: the two of linear layers pick their part by the global rank instead of
`ts.distributed.get_rank()`; the two of split heads compare them with DDP's mean over all ranks, but
split parameters are left out of DDP, so the other group's samples are missing until
`average_over_data` below. With that they pass as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchdistpackage.compat.torchshard as ts
from tests.compat.sharded import close, start
from torchdistpackage.comm.tpc import tpc

REDUCTIONS = ("none", "mean", "sum")
gather, scatter = ts.distributed.gather, ts.distributed.scatter


def criteria(how: str) -> tuple[nn.Module, nn.Module]:
    """torch's and torchshard's, with this reduction."""
    return nn.CrossEntropyLoss(reduction=how), ts.nn.ParallelCrossEntropyLoss(reduction=how)


def one(*shape: int) -> Tensor:
    """The same on all ranks."""
    dist.broadcast(drawn := torch.randn(*shape), 0)
    return drawn


def share_values(plain: nn.Module, split: nn.Module) -> None:
    for theirs, mine in zip(plain.parameters(), split.parameters(), strict=True):
        mine.data.copy_(part_of(theirs.data, mine))


def part_of(full: Tensor, parameter: Tensor) -> Tensor:
    dim = ts.get_parallel_dim(parameter)
    return full if dim is None else scatter(full, -1 if dim == 0 else 0)


def average_over_data(model: nn.Module) -> None:
    """What DDP does not do for split parameters, of which each group has its own copy."""
    for parameter in model.parameters():
        if ts.get_parallel_dim(parameter) is not None and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=tpc.get_group("data"))
            parameter.grad /= tpc.get_dp_size()


def same_gradients(plain: nn.Module, split: nn.Module) -> None:
    for theirs, mine in zip(plain.parameters(), split.parameters(), strict=True):
        assert theirs.grad is not None and mine.grad is not None
        close(mine.grad, part_of(theirs.grad, mine))


# -- test_cross_entropy, test_layers -----------------------------------------------------------


def naive_cross_entropy() -> None:
    for reduction in REDUCTIONS:
        x = 1000 * one(13, 17, 22)
        target = torch.arange(13 * 17) % 22
        plain, split = (x.clone().requires_grad_() for _ in range(2))
        expected = F.cross_entropy(plain.view(-1, 22), target, reduction=reduction)
        parts = scatter(split.view(-1, 22), dim=-1)
        found = ts.nn.functional.parallel_cross_entropy(parts, target, reduction=reduction)
        close(found, expected)
        expected.sum().backward()
        found.sum().backward()
        close(split.grad, plain.grad)


def col_gradients() -> None:
    x, factor = one(7, 26).requires_grad_(), one(7, 34)
    layer = ts.nn.ParallelLinear(26, 34, bias=True, dim=-1)
    (gather(layer(x), dim=-1) * factor).sum().backward()
    close(layer.weight.grad, scatter(factor.t() @ x.detach(), 0))
    close(layer.bias.grad, scatter(factor.sum(0), 0))
    close(x.grad, factor @ gather(layer.weight.detach(), 0))


def row_gradients() -> None:
    x, factor = one(7, 26).requires_grad_(), one(7, 34)
    layer = ts.nn.ParallelLinear(26, 34, bias=True, dim=0)
    (layer(x) * factor).sum().backward()
    close(layer.weight.grad, scatter(factor.t() @ x.detach(), 1))
    close(layer.bias.grad, factor.sum(0))
    close(x.grad, gather(factor @ layer.weight.detach(), -1))


def embedding_gradients() -> None:
    ids, factor = torch.arange(17 * 23).view(17, 23) % 48, one(17, 23, 16)
    plain = nn.Embedding(48, 16, _weight=one(48, 16))
    (plain(ids) * factor).sum().backward()
    for dim in (None, 0, 1, -1):
        layer = ts.nn.ParallelEmbedding(48, 16, dim=dim)
        layer.weight.data.copy_(scatter(plain.weight.data, dim))
        (layer(ids) * factor).sum().backward()
        close(layer(ids), plain(ids))
        close(layer.weight.grad, scatter(plain.weight.grad, dim))


# -- test_modules ------------------------------------------------------------------------------


def linear(din: int, dout: int, dim: int | None) -> nn.Module:
    return nn.Linear(din, dout) if dim is None else ts.nn.ParallelLinear(din, dout, dim=dim)


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, split: bool):
        super().__init__()
        self.heads_here = num_heads // (ts.distributed.get_group_size() if split else 1)
        self.head_width, self.split = width // num_heads, split
        self.kqv = linear(width, 3 * width, 1 if split else None)
        self.p = linear(width, width, 0 if split else None)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        kqv = self.kqv(x).view(batch, length, self.heads_here, 3 * self.head_width)
        k, q, v = (t.transpose(1, 2) for t in ts.slice(kqv, 3, dim=-1, contiguous=True))
        scores = (q @ k.transpose(-2, -1)) * self.head_width**-0.5
        later = torch.ones(length, length).tril() == 0
        weights = F.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
        y = (weights @ v).transpose(1, 2).contiguous().view(batch, length, -1)
        if self.split:
            ts.register_parallel_dim(y, -1)  # as its users write; it is marked already
        return self.p(y)


class FeedForward(nn.Module):
    def __init__(self, width: int, split: bool):
        super().__init__()
        self.ln = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            linear(width, 4 * width, -1 if split else None),
            nn.GELU(),
            ts.nn.RegisterParallelDim(-1) if split else nn.Identity(),
            linear(4 * width, width, 0 if split else None),
            nn.Dropout(0.0),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.ln(x))


def in_ddp(make: Callable[[bool], nn.Module]) -> None:
    """Inside torch's DDP over all ranks: samples of my group gathered, loss over the width."""
    for reduction in REDUCTIONS:
        plain = DistributedDataParallel(make(False))
        raw = make(True)
        ts.register_ddp_parameters_to_ignore(raw)
        split = DistributedDataParallel(raw)
        share_values(plain, split)
        x = gather(torch.randn(3, 4, 8), dim=0)
        target = gather(torch.randint(32, (3,)), dim=0)
        outputs = [model(x) for model in (plain, split)]
        close(outputs[1], outputs[0])
        for criterion, y in zip(criteria(reduction), outputs, strict=True):
            criterion(y.view(6, -1), target).sum().backward()
        average_over_data(split)
        same_gradients(plain, split)


def attention() -> None:
    in_ddp(lambda split: Attention(8, 4, split))


def converted_mlp() -> None:
    """Layer by layer, each conversion giving a new layer; outside DDP, then inside."""
    torch.manual_seed(1)
    plain, split = FeedForward(8, False), FeedForward(8, False)
    convert = ts.nn.ParallelLinear.convert_parallel_linear
    split.mlp[0] = convert(split.mlp[0], dim=1)
    split.mlp[2] = ts.nn.RegisterParallelDim(dim=-1)
    split.mlp[3] = convert(split.mlp[3], dim=0)
    share_values(plain, split)
    x, factor = one(3, 4, 8), one(3, 4, 8)
    close(split(x), plain(x))
    for model in (plain, split):
        (model(x) * factor).sum().backward()
    same_gradients(plain, split)
    in_ddp(lambda split: FeedForward(8, split))


def transformer_block() -> None:
    in_ddp(lambda split: nn.Sequential(Attention(8, 4, split), FeedForward(8, split)))


# -- test_nn -----------------------------------------------------------------------------------


def filled(dim: int | None, bias: float, **options: object) -> tuple[nn.Module, nn.Module]:
    """A plain layer with the values that `shard_init_helper_` gave a split one."""
    plain, split = nn.Linear(8, 16), ts.nn.ParallelLinear(8, 16, bias=True, dim=dim)
    fill = ts.nn.init.shard_init_helper_
    fill(nn.init.kaiming_normal_, split.weight, **options)
    fill(nn.init.constant_, split.bias, val=bias)
    over = {None: None, 0: -1}.get(dim, 0)
    plain.weight.data.copy_(gather(split.weight.data, over))
    plain.bias.data.copy_(split.bias.data if dim in (None, 0) else gather(split.bias.data, 0))
    assert (plain.bias == bias).all() and plain.weight.std() > 0.1
    return plain, split


def column_layer_and_loss() -> None:
    for reduction in REDUCTIONS:
        x, target = one(3, 8), torch.tensor([1, 9, 15])
        plain, split = filled(-1, 0.5, a=0, mode="fan_in", nonlinearity="relu")
        outputs = plain(x), split(x)
        close(gather(outputs[1]), outputs[0])
        losses = [
            criterion(y, target) for criterion, y in zip(criteria(reduction), outputs, strict=True)
        ]
        close(losses[1], losses[0])
        for loss in losses:
            loss.sum().backward()
        same_gradients(plain, split)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(8, 16, kernel_size=1), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(self.conv(x), 1)
        if isinstance(self.fc, ts.nn.ParallelLinear) and self.fc.dim in (-1, 1):
            x = gather(x, dim=0)
        return self.fc(x)


def heads(dim: int | None) -> tuple[nn.Module, nn.Module]:
    """A plain model and one whose head is split, both in DDP over all ranks, of equal values."""
    raw = Head()
    ts.nn.ParallelLinear.convert_parallel_linear(raw, dim=dim)
    plain, split = DistributedDataParallel(Head()), DistributedDataParallel(raw)
    share_values(plain, split)
    return plain, split


def head_in_ddp(dim: int | None) -> None:
    """A column head gathers the features of my group; before a row head its samples are."""
    for reduction in REDUCTIONS:
        plain, split = heads(dim)
        x, target = torch.randn(3, 8, 1, 1), torch.randint(10, (3,))
        if dim == 0:
            x, target = gather(x, 0), gather(target, 0)
        y, found = plain(x), split(x)
        targets = gather(target, 0) if dim == -1 else target
        close(gather(found, 1) if dim == -1 else found, gather(y, 0) if dim == -1 else y)
        theirs, ours = criteria(reduction)
        theirs(y, target).sum().backward()
        ours(found, targets).sum().backward()
        average_over_data(split)
        # my group has two ranks' samples, of which theirs has one rank's
        scale = 1 if dim != -1 or reduction == "mean" else 2
        for parameter in split.module.fc.parameters():
            parameter.grad /= scale
        for parameter in split.module.conv.parameters():
            parameter.grad *= 2 if dim == -1 and reduction == "mean" else 1
        same_gradients(plain, split)


def whole_head_in_ddp() -> None:
    head_in_ddp(None)


def row_head_in_ddp() -> None:
    head_in_ddp(0)


def col_head_in_ddp() -> None:
    head_in_ddp(-1)


def linear_stack() -> None:
    dims = [0, 0, 1, None, -1, 0, 0, -1, None, -1, 1, 0, None, 0, -1]
    sizes = [((8, 16), (16, 8))[i % 2] for i in range(len(dims))]
    plain = [nn.Linear(*size) for size in sizes]
    split = [
        ts.nn.ParallelLinear(*size, bias=True, dim=d) for size, d in zip(sizes, dims, strict=True)
    ]
    x = y = one(3, 8)
    for dim, theirs, mine in zip(dims, plain, split, strict=True):
        for whole in theirs.parameters():
            dist.broadcast(whole.data, 0)
        share_values(theirs, mine)
        x, y = theirs(x), mine(y)
        if hasattr(y, ts._PARALLEL_DIM) and getattr(y, ts._PARALLEL_DIM) in [-1, 1]:
            y = gather(y, dim=dim)
            setattr(y, ts._PARALLEL_DIM, "None")
    close(y, x)


def raw_initial_values() -> None:
    plain, split = filled(None, 0.1)
    close(split(x := one(3, 8)), plain(x))


def row_initial_values() -> None:
    plain, split = filled(0, 0.333, a=0, mode="fan_in", nonlinearity="leaky_relu")
    close(split(x := one(3, 8)), plain(x))


def col_initial_values() -> None:
    plain, split = filled(-1, 0.5, a=0, mode="fan_in", nonlinearity="leaky_relu")
    close(gather(split(x := one(3, 8))), plain(x))


# -- test_serialization ------------------------------------------------------------------------


def save(dim: int, folder: Path) -> tuple[nn.Module, nn.Module, Path]:
    plain, split = heads(dim)
    state = ts.collect_state_dict(split, split.state_dict())
    theirs = plain.state_dict()
    assert [*state] == [*theirs]
    for name, value in state.items():
        assert type(value) is type(theirs[name]) and torch.equal(value, theirs[name])
    path = folder / f"{dim}.pt"
    if dist.get_rank() == 0:
        torch.save({"state_dict": state}, path)
    dist.barrier()
    return plain, split, path


def saved_state(folder: Path) -> None:
    for dim in (-1, 0, 1):
        plain, _, path = save(dim, folder)
        loaded = torch.load(path, weights_only=True)["state_dict"]
        plain.load_state_dict(loaded)  # a file like any other, also without torchshard


def loaded_state(folder: Path) -> None:
    for dim in (-1, 0, 1):
        plain, split, path = save(dim, folder)
        with torch.no_grad():
            for parameter in split.parameters():
                parameter.zero_()
        loaded = torch.load(path, weights_only=True)["state_dict"]
        split.load_state_dict(ts.relocate_state_dict(split, loaded))
        for theirs, mine in zip(plain.parameters(), split.parameters(), strict=True):
            assert torch.equal(mine, part_of(theirs.data, mine))


TABLE = re.findall(r"^\| (test_\w+): (test_\w+) \| (\w+) \|$", __doc__ or "", re.MULTILINE)


def run_case(name: str, folder: Path) -> None:
    start(2)
    torch.manual_seed(12 + dist.get_rank())
    case = globals()[name]
    case(folder) if name.endswith("_state") else case()


@pytest.mark.few(4)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", [ours for *_, ours in TABLE])
def test_a_case_of_its_suite(ranks, name, world, tmp_path):
    ranks(world).run(run_case, name, tmp_path)


def test_the_table_is_its_suite():
    counts = {"test_cross_entropy": 1, "test_layers": 3, "test_modules": 3, "test_nn": 8}
    files = [file for file, *_ in TABLE]
    assert {file: files.count(file) for file in files} == {**counts, "test_serialization": 2}
    assert len({ours for *_, ours in TABLE}) == 17
