"""Modules of one's own, split layer by layer, over threads and ranks."""

from __future__ import annotations

from copy import deepcopy
from threading import current_thread
from typing import ClassVar
from weakref import ref

import pytest
import torch
from torch import nn

from tests.tells import facts_pattern
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.compat.tensor_parallel.model import TensorParallel
from torchdistpackage.compat.tensor_parallel.nested import nested_compare, nested_flatten
from torchdistpackage.compat.tensor_parallel.shard_states import (
    convert_state_dict,
    infer_sharded_device_map,
)
from torchdistpackage.errors import LayoutError
from torchdistpackage.parallel.auto import (
    Config,
    FirstOnly,
    Scale,
    Split,
    make_distributed_shard,
    save_tensor_parallel,
)


class TiedHead(nn.Module):
    """Words, a recurrent layer, torch's attention, and a head with the words' weight."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6, padding_idx=0)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.words.weight

    def forward(self, ids):
        x, _ = self.recurrent(self.words(ids))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return {"logits": self.head(x), "more": (x, None, "as it is")}


def chain():
    """Many layers, so that names are endings of others and numbers have two digits."""
    inner = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6, bias=False))
    return nn.Sequential(
        nn.Linear(5, 6),
        *(nn.Linear(6, 6) for _ in range(10)),
        inner,
        nn.LayerNorm(6),
        nn.Linear(6, 2),
    )


def convolutions(kind: str, **options):
    conv, norm, image = getattr(nn, kind), getattr(nn, f"BatchNorm{kind[-2:]}"), int(kind[-2])
    channels = 8

    def make():
        layers = nn.Sequential(
            conv(channels, 2 * channels, 3, **options),
            norm(2 * channels),
            nn.ReLU(inplace=True),
            conv(2 * channels, channels, (3,) * image, **options),
        )
        shape = (2, channels, *(9,) * image)
        return layers, torch.randn(shape, dtype=torch.float64)

    return make


def bag():
    layers = nn.Sequential(nn.EmbeddingBag(9, 5, mode="max"), nn.Linear(5, 3), nn.Linear(3, 1))
    return layers, torch.randint(0, 9, (4, 3))


def encoder():
    layer = nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(layers, nn.Linear(6, 3)), torch.randn(2, 4, 6, dtype=torch.float64)


MODULES = {
    "tied head": lambda: (TiedHead(), torch.randint(0, 11, (3, 4))),
    "chain": lambda: (chain(), torch.randn(3, 5, dtype=torch.float64)),
    "bag": bag,
    "encoder": encoder,
    "Conv1d": convolutions("Conv1d", stride=2),
    "Conv2d": convolutions("Conv2d", padding="same"),
    "Conv3d": convolutions("Conv3d", dilation=2),
    "groups": convolutions("Conv2d", groups=2),
    "groups in 1d": convolutions("Conv1d", groups=4, bias=False),
    "depthwise": convolutions("Conv2d", groups=8),
    "ConvTranspose1d": convolutions("ConvTranspose1d", groups=2),
    "ConvTranspose2d": convolutions("ConvTranspose2d", groups=8),
    "ConvTranspose3d": convolutions("ConvTranspose3d"),
}


def total(output) -> torch.Tensor:
    if isinstance(output, dict):
        return output["logits"].square().mean() + output["more"][0].mean()
    return output.square().mean()


def alike(found, expected, atol: float) -> None:
    """Nested alike, with the same types and, within `atol`, numbers."""
    assert nested_compare(found, expected) and type(found) is type(expected)
    for ours, theirs in zip(nested_flatten(found), nested_flatten(expected), strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, atol=atol, rtol=1e-9)
        else:
            assert ours == theirs


def as_before(name: str, num: int | None, sharded: bool) -> None:
    """Outputs, the input's gradient, and all state after two steps."""
    torch.manual_seed(0)
    module, x = MODULES[name]()
    module.double()
    split = tensor_parallel(deepcopy(module), num and ["cpu"] * num, sharded=sharded)
    inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
    options = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
    optimizers = [torch.optim.SGD(each.parameters(), **options) for each in (module, split)]
    for _ in range(2):
        with torch.no_grad():
            split(x)  # whose tensors are not those of training
            module(x)
        found = []
        for each, given, optimizer in zip((module, split), inputs, optimizers, strict=True):
            optimizer.zero_grad()
            output = each(given)
            total(output).backward()
            optimizer.step()
            found.append(output)
        alike(found[1], found[0], atol=1e-11)
    if x.is_floating_point():
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad, atol=1e-10, rtol=1e-12)
    with save_tensor_parallel(split):
        state = split.state_dict()
    assert list(state) == list(module.state_dict())
    alike(dict(state), dict(module.state_dict()), atol=1e-11)
    split.eval()
    module.eval()
    with torch.inference_mode():
        alike(split(x), module(x), atol=1e-11)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("num", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 4))])
@pytest.mark.parametrize("sharded", [False, True])
def test_over_threads(name, num, sharded):
    as_before(name, num, sharded)


def all_as_before() -> None:
    for name in MODULES:
        as_before(name, None, False)


@pytest.mark.full
@pytest.mark.parametrize("num", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 4))])
@pytest.mark.late_in_full
def test_over_ranks(ranks, num):
    ranks(num).run(all_as_before)


def plan(num: int, *, full: bool, bias) -> Config:
    """An MLP between norms: the first layer by columns, the second by rows."""
    return Config(
        {r"^1\.(weight|bias)$": Split(num, 0), r"^3\.weight$": Split(num, 1), r"^3\.bias$": bias},
        {"^1$": {"input": "copy"}} if full else {},
        {"^3$": {0: "sum"}},
        {},
        full_gradients=full,
    )


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.LayerNorm(4), nn.Linear(4, 7), nn.GELU(), nn.Linear(7, 4), nn.LayerNorm(4))
    return nn.Sequential(*layers).double()


def own_plan(num: int | None, shards: int, full: bool, scale: bool) -> None:
    module = mlp()
    bias = Scale(shards) if scale else FirstOnly()
    config = plan(shards, full=full, bias=bias)
    split = tensor_parallel(deepcopy(module), num and ["cpu"] * num, config)
    x = torch.randn(3, 4, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for each, given in zip((module, split), inputs, strict=True):
        each(given).square().sum().backward()
        optimizer = torch.optim.SGD if scale else torch.optim.Adam
        optimizer(each.parameters(), lr=0.1).step()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, atol=1e-12, rtol=0)
    with save_tensor_parallel(split):
        torch.testing.assert_close(dict(split.state_dict()), dict(module.state_dict()))


@pytest.mark.few(1)
@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("scale", [True, False])
def test_a_plan_of_ones_own(ranks, full, scale):
    own_plan(3, 3, full, scale)
    ranks(3).run(own_plan, None, 3, full, scale)


class FailsOnPart(nn.Module):
    """Its first shard raises, returns early, or goes on."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(4, 5), nn.Linear(5, 4)

    def forward(self, x):
        is_first = current_thread().name == "tdp-shard-0"
        if is_first and self.how == "raise":
            raise KeyError("of the first shard")
        x = self.first(x)
        if is_first and self.how == "leave":
            return x
        return self.second(x)


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [("raise", KeyError, "of the first shard"), ("leave", RuntimeError, "took different ways")],
)
def test_the_exception_of_a_shard_is_raised_and_the_next_call_works(how, error, text):
    module = FailsOnPart(how)
    split = tensor_parallel(module, ["cpu"] * 2)
    with pytest.raises(error, match=text):
        split(torch.ones(2, 4))
    for shard in split.module_shards:
        shard.how = "go on"
    torch.testing.assert_close(
        split(torch.ones(2, 4)), module.second(module.first(torch.ones(2, 4)))
    )


def test_state_of_threads_is_the_callers():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = nn.Linear(4, 4), []

        def forward(self, x):
            y = self.layer(x)
            kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
            self.seen.append((y.dtype, kind, torch.is_grad_enabled(), torch.is_inference(y)))
            return y

    split = tensor_parallel(Asks(), ["cpu"] * 2)
    x = torch.ones(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        split(x)
    with torch.inference_mode():
        split(x)
    with torch.no_grad():
        split(x)
    for shard in split.module_shards:
        assert shard.seen == [
            (torch.bfloat16, torch.bfloat16, True, False),
            (torch.float32, None, False, True),
            (torch.float32, None, False, False),
        ]


def test_frozen_parameters_stay_frozen():
    for sharded in (False, True):
        module = mlp()
        module[0].requires_grad_(False)
        module[1].bias.requires_grad_(False)
        split = tensor_parallel(
            module, ["cpu"] * 2, plan(2, full=True, bias=FirstOnly()), sharded=sharded
        )
        split(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        frozen = [p for p in split.parameters() if not p.requires_grad and p.numel()]
        assert frozen and all(p.grad is None for p in frozen)
        assert all(p.grad is not None for p in split.parameters() if p.requires_grad)


def test_refusals():
    module = mlp()
    with pytest.raises(AssertionError, match="a single Linear was given; pass a container"):
        tensor_parallel(nn.Linear(2, 2), ["cpu"] * 2)
    with pytest.raises(AssertionError, match="pass one of them"):
        TensorParallel(module, ["cpu"] * 2, output_device="cpu", output_device_index=0)
    with pytest.raises(AssertionError, match="output device meta is not in"):
        TensorParallel(module, ["cpu"] * 2, output_device="meta")
    with pytest.raises(TypeError, match="unexpected keyword argument 'devices'"):
        tensor_parallel(module, ["cpu"] * 2, devices=1)
    with pytest.raises(LayoutError, match=facts_pattern("3.weight", "shape (4, 7)")):
        tensor_parallel(module, ["cpu"] * 2, Config({"3.weight": Split(2, 2)}, {}, {}, {}))
    quantised = mlp()
    quantised[1].weight = nn.Parameter(torch.ones(7, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(LayoutError, match=facts_pattern("1.weight", "torch.int8")):
        tensor_parallel(quantised, ["cpu"] * 2)
    split = tensor_parallel(module, ["cpu"] * 2, sharded=True)
    with pytest.raises(RuntimeError, match="apply_sharding was called before"):
        split.apply_sharding()
    with pytest.raises(RuntimeError, match="meta device have no numbers"):
        tensor_parallel(mlp().to("meta"), ["cpu"] * 2, sharded=True)
    moved = tensor_parallel(module, ["cpu"] * 2).to("meta")
    with pytest.raises(ValueError, match="were moved away from the devices"):
        moved(torch.ones(1, 4))


def test_a_part_of_the_state_is_converted_by_itself():
    """For modules on the meta device, whose weights come from several files."""
    module = chain().double()
    split = tensor_parallel(chain().double().to("meta"), ["cpu"] * 2)
    split.to_empty(device="cpu")
    device_map = infer_sharded_device_map(split)
    for name, tensor in module.state_dict().items():
        parts = convert_state_dict({name: tensor}, split.tensor_parallel_config, 2)
        assert set(parts) <= set(device_map)
        split.load_state_dict(parts, strict=False)
    x = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(split(x), module(x))
    whole = convert_state_dict(module.state_dict(), split.tensor_parallel_config, 2)
    assert set(whole) == set(split.state_dict())


def bare_shard() -> None:
    module = mlp()
    shard, modified = make_distributed_shard(module, "cpu", plan(2, full=True, bias=FirstOnly()))
    assert modified == {"1.tp_wrapped_module.weight", "1.tp_wrapped_module.bias"} | {
        f"3.tp_wrapped_module.{name}" for name in ("weight", "bias")
    }
    x = torch.ones(2, 4, dtype=torch.float64)
    torch.testing.assert_close(shard(x), module(x))


def test_a_shard_without_its_wrapper(ranks):
    ranks(2).run(bare_shard)


def different_weights() -> None:
    torch.manual_seed(torch.distributed.get_rank())
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first = [p.clone() for p in module.parameters()]
    split = tensor_parallel(module)
    with save_tensor_parallel(split):
        state = list(split.state_dict().values())
    for tensor, mine in zip(state, first, strict=True):
        torch.distributed.broadcast(mine.data, 0)
        assert torch.equal(tensor, mine)
    other = nn.Sequential(nn.Linear(4, 4 + torch.distributed.get_rank()))
    with pytest.raises(LayoutError, match="build the same module on all ranks"):
        tensor_parallel(other)


def test_ranks_with_different_weights_use_those_of_the_first(ranks):
    ranks(2).run(different_weights)


@pytest.mark.parametrize("num", [2, 3])
def test_sharded_parameters_are_held_once_but_for_padding(num):
    """What `TensorParallel` splits by itself, and ZeRO what that leaves whole."""
    module = nn.Sequential(
        nn.Embedding(13, 64), nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 10)
    )
    split = TensorParallel(module, ["cpu"] * num, sharded=False)
    held = [sum(p.numel() for p in each.parameters()) for each in (module, split)]
    split.apply_sharding()
    padding = {2: 0, 3: 4}[num]
    assert held[1] == held[0] + (num - 1) * 128
    assert sum(p.numel() for p in split.parameters()) == held[0] + padding


class Watched(nn.LayerNorm):
    """Remembers the tensors that it computed with."""

    used: ClassVar[list[ref[torch.Tensor]]] = []

    def forward(self, x):
        self.used.append(ref(self.weight))
        return super().forward(x)


def test_full_weights_live_for_a_forward_or_its_backward():
    module = nn.Sequential(nn.Linear(4, 4), Watched(4))
    split = tensor_parallel(module, ["cpu"] * 3, sharded=True, verify=False)
    with torch.no_grad():
        split(torch.ones(1, 4))
    assert len(Watched.used) == 3 and not any(each() is not None for each in Watched.used)
    Watched.used.clear()
    split(torch.ones(1, 4)).sum().backward()
    assert len(Watched.used) == 3 and not any(each() is not None for each in Watched.used)
    assert all(p.grad is not None for p in split.sharding_manager.flat_shards)
