"""Memory of a profile is counted exactly; times are compared with those of a stopwatch."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ddp.allocated import Meter
from tests.tells import facts_pattern
from torchdistpackage import (
    get_model_profile,
    register_profile_hooks,
    remove_profile_hooks,
    report_prof,
)
from torchdistpackage.tools import module_profiler

MB = 1e6
ROWS, DIM = 1000, 250
X_MB = ROWS * DIM * 4 / MB  # 1 MB


def profile(model: nn.Module, *args: object, **kwargs: object) -> dict:
    return get_model_profile(model, args, kwargs, show=False)


def mem(infos: dict, name: str = "root") -> float:
    return infos[name]["fwd_mem"]


def rows() -> torch.Tensor:
    return torch.randn(ROWS, DIM)


class Halves(nn.Module):
    """Saves both halves of one storage, and the product of it."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(DIM, 2 * DIM)

    def forward(self, x):
        left, right = self.proj(x).chunk(2, -1)
        return left * right


def test_memory_is_what_autograd_saved():
    """Each storage once, whatever the views; neither weights nor outputs that nobody needs."""
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
    x = rows()
    infos = register_profile_hooks(model)
    model(x)
    assert list(infos) == ["root", "0", "1", "2"]
    assert {name: mem(infos, name) for name in infos} == {
        "0": X_MB,  # its input
        "1": X_MB,  # its result
        "2": X_MB,  # the same storage
        "root": 2 * X_MB,
    }
    assert mem(profile(Halves(), x)) == X_MB + 2 * X_MB
    assert mem(profile(Halves(), x), "proj") == X_MB
    expanded = torch.randn(ROWS, 1).expand(ROWS, DIM)
    assert mem(profile(nn.Linear(DIM, 1), expanded)) == ROWS * 4 / MB, "of its storage"


class Plain(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f, self.weight = f, nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        return self.f(self, *args, **kwargs)


@dataclass
class Out:
    y: object
    rest: object


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda m, x: x * 1.0 * m.weight, X_MB),
        (lambda m, x: (x * m.weight).exp(), 2 * X_MB),
        (lambda m, x: (x * m.weight).exp_(), 2 * X_MB),  # in place: the result alone, and x
        (lambda m, x: {"y": Out((x * m.weight).sin(), 1)}, 2 * X_MB),
        (lambda m, x: (x * m.weight, (x * m.weight).exp().detach())[0], X_MB),  # dropped
        (lambda m, x: checkpoint(lambda x: (x * m.weight).sin(), x, use_reentrant=False), X_MB),
        (lambda m, x: torch.no_grad()(lambda: x * m.weight)(), 0.0),
        (lambda m, x: (x.double() * m.weight).float(), 2 * X_MB),
        (lambda m, x: x.to(torch.int8).float() * m.weight, X_MB),
        (lambda m, x: None, 0.0),
    ],
)  # fmt: skip
def test_memory_of_what_modules_do(forward, expected):
    assert mem(profile(Plain(forward), rows())) == expected


def test_memory_is_what_stays_allocated():
    """The storages that stay, counted under every operation. It saves a copy of its input."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1)
    x = torch.randn(8, 50, 64)
    infos, meter = profile(layer, x), Meter()
    output = meter.run(layer, x)
    held = meter.now - output.untyped_storage().nbytes()

    assert mem(infos) == pytest.approx(held / MB, rel=1e-3)


def test_what_is_changed_in_place_after_it_was_saved_is_refused():
    model = Plain(lambda m, x: (x * m.weight).exp())
    register_profile_hooks(model)
    output = model(rows())
    output.add_(1)
    with pytest.raises(RuntimeError, match=facts_pattern("version 1", "version 0")):
        output.sum().backward()


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.backward_s)
        return grad, None, None


class Slow(nn.Module):
    def __init__(self, forward_s, backward_s):
        super().__init__()
        self.times = forward_s, backward_s
        self.weight = nn.Parameter(torch.ones(1))
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(Sleeps.apply(x * self.weight, *self.times))


def test_times_of_forward_and_backward():
    """Also of a module in place on what another returned, which hooks on modules refuse."""
    shared = Slow(0.02, 0.04)
    model = nn.Sequential(Slow(0.01, 0.06), shared, shared)
    infos = profile(model, torch.ones(3))
    for name, forward_ms, backward_ms in (("0", 10, 60), ("1", 40, 80), ("root", 50, 140)):
        assert forward_ms <= infos[name]["fwd_time"] <= infos["root"]["fwd_time"]
        assert backward_ms <= infos[name]["bwd_time"] <= infos["root"]["bwd_time"]
    assert infos["1"]["num_calls"] == 2 and "2" not in infos, "one module with one name"
    for kind, rest_ms in (("fwd_time", 10), ("bwd_time", 60)):  # no time counts twice
        assert infos["0"][kind] + infos["1"][kind] <= infos["root"][kind] + 1e-6
        assert infos["0.act"][kind] <= infos["0"][kind] - rest_ms


def test_a_recomputed_forward_is_time_of_the_backward():
    block = Slow(0.03, 0.0)
    model = Plain(lambda m, x: checkpoint(m.block, x * m.weight, use_reentrant=False))
    model.block = block
    infos = profile(model, torch.ones(3))
    assert infos["block"]["num_calls"] == 1
    assert infos["root"]["bwd_time"] >= 30


def test_the_hooks_by_hand():
    """On some modules only, and after an exception left a forward open."""
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, 7))
    infos: dict = {}
    handles = [model[0].register_forward_pre_hook(module_profiler.fwd_pre_hook_wrapper("a", infos))]
    handles += [model[0].register_forward_hook(module_profiler.fwd_hook_wrapper("a", infos))]
    model(rows())
    assert list(infos) == ["a"] and mem(infos, "a") == X_MB and infos["a"]["fwd_time"] > 0
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(2, 3))
    model(rows())
    assert mem(infos, "a") == X_MB
    for handle in handles:
        handle.remove()
    infos.clear()
    model(rows())
    assert not infos
    alone = nn.Linear(2, 2)
    alone.register_forward_hook(module_profiler.fwd_hook_wrapper())
    alone(torch.ones(1, 2))  # no forward was begun: nothing to complete


def test_each_forward_is_profiled_anew_into_the_dict_given():
    model, mine = nn.Linear(DIM, 2), {"other": {}}
    assert register_profile_hooks(model, mine) is mine
    model(rows())
    model(rows())
    assert mem(mine) == X_MB and mine["root"]["num_calls"] == 1 and "other" in mine
    new = register_profile_hooks(model)  # in place of the former
    assert new is not mine and new == {}
    assert register_profile_hooks(nn.Linear(1, 1)) is not new
    mine.clear()
    model(rows())
    assert new and not mine
    copy.deepcopy(model)
    remove_profile_hooks(model)
    new.clear()
    model(rows())
    assert not new and not model._forward_hooks and not model._forward_pre_hooks


def test_an_exception_ends_the_profile_of_its_forward():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3))
    infos = register_profile_hooks(model)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, 2))
    x = torch.ones(4, 4, requires_grad=True)
    y = x.exp()
    assert y.grad_fn._saved_result.shape == (4, 4), "no hook of ours is left"
    model[1] = nn.Linear(2, 2)
    model(torch.ones(1, 2))
    assert infos["root"]["num_calls"] == 1


def test_a_profile_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    model[0].weight.grad = torch.ones(8, 8)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(7)
    want = torch.rand(3)
    torch.manual_seed(7)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    infos = profile(model, x)
    assert torch.equal(torch.rand(3), want)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))  # noqa: B905
    assert torch.equal(model[0].weight.grad, torch.ones(8, 8)) and x.grad is None
    assert model[0].bias.grad is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert [infos[n]["has_state"] for n in ("root", "0", "1", "2")] == [True, False, True, False]


def test_keyword_arguments_and_several_outputs():
    def forward(m, x, *, y, flag):
        return {"a": x * m.weight, "b": [y * m.weight, flag]}

    infos = profile(Plain(forward), rows(), y=rows(), flag=True)
    assert mem(infos) == 2 * X_MB and infos["root"]["bwd_time"] > 0


INFOS = {
    "root": {"fwd_time": 29.402, "fwd_mem": 384.2},
    "conv1": {"fwd_time": 1.13264, "fwd_mem": 11.4},
    "bn1": {"fwd_time": 0.8379, "fwd_mem": 51.0, "bwd_time": 2.0},
    "layer1.0.conv1": {"fwd_time": 0.7857, "fwd_mem": 13.0},
    "layer1.10.conv1": {"fwd_time": 0.5, "fwd_mem": 70.0},
    "layer1.10": {"fwd_time": 0.9, "fwd_mem": 60.0},
    "relu": {"fwd_time": 0.0, "fwd_mem": 0.0},
}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, [["root"], ["layer1.10", "bn1"], ["layer1.10.conv1"]]),
        ({"min_mem": 20}, [["root"], ["layer1.10", "bn1"], ["layer1.10.conv1"]]),
        ({"min_mem": 5, "topn": 1}, [["root"], ["layer1.10"], ["layer1.10.conv1"]]),
        ({"min_mem": 5, "topn": -1, "max_depth": 1}, [["root"], ["layer1.10", "bn1", "conv1"]]),
        ({"sort": False, "max_depth": 1}, [["root"], ["conv1", "bn1", "layer1.10", "relu"]]),
    ],
)  # fmt: skip
def test_the_report(capsys: pytest.CaptureFixture[str], options, names):
    """In the earlier package's lines."""
    assert module_profiler.sort_mem_time_ratio is report_prof
    report_prof(INFOS, **options)
    shown = capsys.readouterr().out
    blocks = [block.splitlines() for block in shown.split("\nlevel: ")[1:]]
    assert [[line.partition(":")[0] for line in block[1:]] for block in blocks] == names
    assert [block[0] for block in blocks] == [str(i) for i in range(len(names))]
    assert "\nroot: MEM: 384 MB; Time: 29.402 ms\n" in shown
    assert "bn1: MEM: 51 MB; Time: 0.8379 ms; Backward: 2.0 ms\n" in shown or "bn1" not in shown
    assert "conv1: MEM: 11 MB; Time: 1.1326 ms\n" in shown or ["conv1"] not in names


def test_the_report_of_a_profile(capsys: pytest.CaptureFixture[str]):
    get_model_profile(Halves(), (rows(),), min_mem=1)
    assert capsys.readouterr().out.startswith("\nlevel: 0\nroot: MEM: 3 MB; Time: ")


def test_bad_input_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="args is a Tensor; pass a tuple"):
        get_model_profile(model, torch.ones(3, 2))
    with pytest.raises(TypeError, match=r"the model is a function; pass a torch.nn.Module"):
        register_profile_hooks(lambda x: x)
    with pytest.raises(
        TypeError, match=facts_pattern("get_model_profile", "NoneType", "torch.nn.Module")
    ):
        get_model_profile(None, (torch.ones(3, 2),))
    with pytest.raises(ValueError, match=facts_pattern("0 repeats", "1 call")):
        get_model_profile(model, (torch.ones(3, 2),), repeats=0)
