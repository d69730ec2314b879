"""torch's clipping, loss scaler and optimizers on parameters that are parts, or copies."""

from __future__ import annotations

import math
import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as torch_clip

import torchdistpackage.compat.torchshard as ts
from torchdistpackage import save_tensor_parallel, tensor_parallel
from torchdistpackage.errors import LayoutError
from torchdistpackage.optim.clip import clip_grad_norm_
from torchdistpackage.optim.scaler import GradScaler
from torchdistpackage.parallel.tensor.linear import ColumnLinear, RowLinear

P = (1.0, 2.0, math.inf)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), nn.LayerNorm(3))


def split_mlp(plain: nn.Sequential, kind: str) -> nn.Sequential:
    split = deepcopy(plain)
    if kind == "torchshard":
        split[0] = ts.nn.ParallelLinear.convert_parallel_linear(plain[0], dim=1)
        split[2] = ts.nn.ParallelLinear.convert_parallel_linear(plain[2], dim=0)
    else:
        split[0] = ColumnLinear(6, 8).from_full(plain[0])
        split[2] = RowLinear(8, 3).from_full(plain[2])
    return split


def backward(model: nn.Module, x: Tensor, scaler: Any = None) -> None:
    model.zero_grad()
    loss = (model(x) * torch.arange(3.0)).square().sum()
    (loss if scaler is None else scaler.scale(loss)).backward()


def on_ranks() -> None:
    ts.distributed.init_process_group()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    plain, x = mlp(), torch.randn(4, 6)
    for kind in ("torchshard", "ours"):
        split = split_mlp(plain, kind)
        for p in P:
            backward(plain, x), backward(split, x)
            expected, ours = (
                torch_clip(plain.parameters(), 0.1, p),
                torch_clip(split.parameters(), 0.1, p),
            )
            torch.testing.assert_close(ours, expected)
            torch.testing.assert_close(split[2].bias.grad, plain[2].bias.grad)
        backward(plain, x), backward(split, x)
        alone = torch_clip(split[3].parameters(), 1.0)  # of which no rank has a part
        torch.testing.assert_close(alone, torch_clip(plain[3].parameters(), 1.0))

        # a gradient that is not finite on one rank alone
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer, before = torch.optim.SGD(split.parameters(), 0.1), deepcopy(split.state_dict())
        for culprit in (1, None):
            backward(split, x, scaler)
            if culprit == ts.distributed.get_rank():
                split[0].weight.grad[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            kept = [torch.equal(before[name], now) for name, now in split.state_dict().items()]
            assert scaler.get_scale() == 2.0 and all(kept) == (culprit is not None)
        ours = GradScaler()
        backward(split, x, ours)
        ours.step(optimizer)
        ours.update()

        for of_whole in (torch.optim.Adafactor, torch.optim.LBFGS):
            with pytest.raises(LayoutError, match="computes with whole parameters"):
                of_whole(split.parameters()).step(*[float] * (of_whole is torch.optim.LBFGS))
        torch.optim.Adafactor(split[3].parameters()).step()


def test_torch_agrees_about_parts_on_ranks(ranks):
    ranks(2).run(on_ranks)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


@pytest.mark.parametrize("sharded", [False, True])
def test_shards_in_threads_count_once(sharded):
    torch.manual_seed(7)
    plain, x = mlp().double(), torch.randn(4, 6).double()
    split = tensor_parallel(plain, ["cpu"] * 3, sharded=sharded)
    again = pickle.loads(pickle.dumps(split))  # noqa: S301
    for model in (split, deepcopy(split), again):
        for p in P:
            for clip in (torch_clip, clip_grad_norm_):
                backward(plain, x), backward(model, x)
                expected = torch_clip(plain.parameters(), 0.1, p)
                torch.testing.assert_close(clip(model.parameters(), 0.1, p), expected)
        step = torch.optim.SGD(model.parameters(), 0.5).step
        step()  # the shards still have the same parameters
    assert not sharded or split.sharding_manager is not None
    if not sharded:
        with pytest.raises(LayoutError, match="Adafactor computes with whole parameters"):
            torch.optim.Adafactor(split.parameters()).step()


def test_a_module_with_a_split_part_is_pickled_and_saved_whole():
    torch.manual_seed(7)
    plain = Outer(mlp()).double()
    split, x = deepcopy(plain), torch.randn(4, 6).double()
    split.inner = tensor_parallel(plain.inner, ["cpu"] * 2)
    again = pickle.loads(pickle.dumps(split))  # noqa: S301
    torch.testing.assert_close(again(x), plain(x), rtol=1e-12, atol=1e-12)
    with save_tensor_parallel(split):
        state = split.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    with pytest.raises(LayoutError, match="without a split module"), save_tensor_parallel(plain):
        pass
