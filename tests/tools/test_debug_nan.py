"""NaN and Inf are found in every kind of value, and named by rank, step, module and tensor."""

from __future__ import annotations

import logging
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.tells import facts_pattern
from torchdistpackage import NonFiniteError, watch_nonfinite
from torchdistpackage.tools import debug_nan
from torchdistpackage.tools.nested import tensors_in

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("value", "clean"),
    [
        (torch.ones(2, 3), True),
        (torch.tensor([1.0, NAN]), False),
        (torch.tensor([-INF]), False),
        (torch.tensor(NAN), False),
        (torch.tensor([1 + 1j * INF]), False),
        (torch.tensor([1, 2]), True),
        (torch.tensor([True]), True),
        (torch.empty(0), True),
        (torch.full((4,), 3e38), True),  # its sum overflows
        (torch.full((4,), 6e4, dtype=torch.float16), True),
        (torch.tensor([NAN]).to(torch.float8_e4m3fn), False),
        (torch.ones(2).to(torch.float8_e5m2), True),
        (torch.tensor([[0, NAN]]).to_sparse(), False),
        (torch.empty(2, device="meta"), True),
    ],
)
def test_which_tensors_are_finite(value, clean):
    assert debug_nan.check_tensor_inf_nan(value) is clean
    assert debug_nan._has_inf_or_nan(value) is not clean


def test_what_is_no_tensor_is_refused():
    with pytest.raises(TypeError, match="got a float"):
        debug_nan.check_tensor_inf_nan(1.0)


Pair = namedtuple("Pair", "a b")


@dataclass
class Output:
    hidden: object
    rest: object = None


def test_tensors_are_found_in_nested_values():
    bad, good = torch.tensor([NAN]), torch.ones(1)
    loop: list = [good]
    loop.append(loop)
    values = {
        "": bad,
        "[1]": [good, bad],
        "['x'][0]": {"x": (bad, good)},
        ".rest['y'].b": Output(good, {"y": Pair(good, bad)}),
        ".sample": SimpleNamespace(sample=bad),
        "[0].sample.hidden": (SimpleNamespace(sample=Output(bad)),),
    }
    for path, value in values.items():
        assert debug_nan.check_tensors(value) is False
        found = [p for p, x in tensors_in(value) if not debug_nan.check_tensor_inf_nan(x)]
        assert found == [path]
    for value in (None, "nan", NAN, [], {}, loop, [good, {"a": good}], Output):
        assert debug_nan.check_tensors(value) is True


def test_parameters_are_named(caplog: pytest.LogCaptureFixture):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert debug_nan.check_model_params(model) is True and not caplog.records
    with torch.no_grad():
        model[0].bias[0], model[1].weight[1, 1] = INF, NAN
    assert debug_nan.check_model_params(model) is False
    assert caplog.messages == [
        f"rank 0: model param: {name} contains nan/inf!" for name in ("0.bias", "1.weight")
    ]


class Log(nn.Module):
    """Inf at 0; its gradient is too."""

    def forward(self, x, *, scale=1.0):
        return {"out": (x * scale).log()}


def test_the_earlier_hooks_log_inputs_and_raise_on_outputs(caplog: pytest.LogCaptureFixture):
    model = Log()
    model.register_forward_hook(debug_nan.fwd_hook_wrapper("log"))
    model(torch.ones(2))
    assert not caplog.records
    with pytest.raises(NonFiniteError, match="rank 0: log output contains nan/inf!"):
        model(torch.tensor([NAN]))
    assert [m.split(": ")[1] for m in caplog.messages] == [
        "log input contains nan/inf!",
        "log output contains nan/inf!",
    ]
    caplog.clear()
    layer = nn.Linear(2, 2)
    layer.register_full_backward_hook(debug_nan.bwd_hook_wrapper())
    x = torch.ones(1, 2, requires_grad=True)
    layer(x).sum().backward()
    assert not caplog.records
    with pytest.raises(NonFiniteError, match="Linear grad_input contains nan/inf!"):
        layer(x).backward(torch.tensor([[1.0, INF]]))
    assert "Linear grad_output contains" in caplog.messages[0]


class Net(nn.Module):
    """Its ReLU works in place on what a watched module returned."""

    def __init__(self):
        super().__init__()
        self.first, self.act = nn.Linear(3, 3), nn.ReLU(inplace=True)
        self.log = Log()

    def forward(self, x):
        return self.log(self.act(self.first(x)) + 1.0, scale=self.scale)["out"]

    scale = 1.0


def test_the_first_module_is_named_with_its_step(caplog: pytest.LogCaptureFixture):
    model = Net()
    x = torch.randn(2, 3)
    with watch_nonfinite(model) as watch:
        for _ in range(2):
            model(x).sum().backward()
        assert watch.check_parameters() and watch.first is None and watch.step == 2
        model.scale = 0.0
        with pytest.raises(NonFiniteError, match=facts_pattern("rank 0", "step 3", "'out'")):
            model(x)
    assert watch.first and watch.first.module == "log" and watch.first.inputs_finite
    with watch_nonfinite(model, "log") as watch:
        model(x)
    names = [message.partition(": ")[2].partition(" contains")[0] for message in caplog.messages]
    assert names[1:] == ["output['out'] of log (Log)", "output of root (Net)"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    caplog.clear()
    model(x)
    assert not caplog.records


def test_a_gradient_is_named_by_the_module_whose_output_it_is_of():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    nn.init.constant_(model[2].weight, 3e38)
    x = torch.ones(1, 2)
    with watch_nonfinite(model) as watch:
        out = model(x * 0)
        with pytest.raises(NonFiniteError, match="step 1: grad_output of 1 "):
            out.backward(torch.ones(1, 2))
        assert watch.first and watch.first.what == "grad_output"
    with watch_nonfinite(nn.Linear(1, 1), "log") as watch:
        for p in watch._model.parameters():
            p.grad = torch.full_like(p, NAN)
        assert not watch.check_parameters()
    assert (watch.first.what, watch.first.module) == ("gradient", "weight")


def test_another_action_is_refused():
    with (
        pytest.raises(ValueError, match=facts_pattern("on_nonfinite", "'stop'")),
        watch_nonfinite(nn.Linear(1, 1), "stop"),
    ):
        pass


def test_what_is_no_module_is_refused():
    with pytest.raises(
        TypeError, match=facts_pattern("watch_nonfinite", "NoneType", "torch.nn.Module")
    ):
        watch_nonfinite(None).__enter__()
    with pytest.raises(TypeError, match=facts_pattern("check_model_params", "torch.nn.Module")):
        debug_nan.check_model_params([])


def on_one_rank_of_two() -> str:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with watch_nonfinite(model, "log") as watch:
        logging.getLogger(debug_nan.__name__).setLevel(logging.ERROR)
        for step in range(3):
            x = torch.ones(1, 2)
            model(x * NAN if (dist.get_rank(), step) == (1, 1) else x)
    logging.getLogger(debug_nan.__name__).setLevel(logging.NOTSET)
    return str(watch.first)


def test_the_rank_is_named(ranks):
    clean, bad = ranks(2).run(on_one_rank_of_two)
    assert clean == "None"
    assert bad == (
        "rank 1, step 2: output of 0 (Linear) contains nan/inf; its inputs were not finite already"
    )
