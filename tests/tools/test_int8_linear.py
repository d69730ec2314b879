"""int8 layers: torch's own against the exact product, bitsandbytes' for real, and both absent."""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.tells import facts_pattern
from torchdistpackage import (
    replace_linear_by_bminf,
    replace_linear_by_bnb,
    replace_linear_by_int8,
)
from torchdistpackage.tools.int8_linear import Int8Linear


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8, bias=False)).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_int8_layer_is_the_product_of_rounded_weights(dtype):
    """Weights are off by half of the row's step at most; inputs by one of 127 steps."""
    torch.manual_seed(1)
    linear = nn.Linear(16, 12).to(dtype)
    with torch.no_grad():
        linear.weight[3] = 0.0  # a row without a scale of its own
    int8 = replace_linear_by_int8(linear)
    assert isinstance(int8, Int8Linear) and int8.weight.dtype == torch.int8
    step = linear.weight.detach().float().abs().amax(1, keepdim=True) / 127
    assert ((int8.dequantized() - linear.weight.float()).abs() <= step / 2 + 1e-7).all()
    x = torch.randn(2, 3, 16, dtype=dtype)
    y = int8(x)
    assert y.shape == (2, 3, 12) and y.dtype == dtype
    exact = F.linear(x.float(), int8.dequantized(), linear.bias.float())
    room = (x.float().amax() - x.float().amin()) / 127 * int8.dequantized().abs().sum(1)
    assert ((y.float() - exact).abs() <= room + 0.01).all()
    assert (y.float() - exact).abs().max() > 0, "inputs are rounded"


def test_an_int8_layer_is_copied_saved_and_loaded():
    model = replace_linear_by_int8(net())
    x = torch.randn(4, 32)
    want = model(x)
    assert torch.equal(copy.deepcopy(model)(x), want)
    other = replace_linear_by_int8(nn.Sequential(*[copy.deepcopy(m) for m in net()]))
    with torch.no_grad():
        other[0].scale.mul_(3)
    assert not torch.equal(other(x), want)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), want)
    assert sum(b.nbytes for b in model.buffers()) < sum(p.nbytes for p in net().parameters()) / 3
    assert "in_features=32, out_features=64, bias=True" in repr(model)


def test_attention_keeps_the_projection_whose_weight_it_reads():
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    model = replace_linear_by_int8(nn.Sequential(nn.Linear(8, 8), attention.out_proj))
    assert type(model[1]) is type(attention.out_proj)
    layer = replace_linear_by_int8(nn.TransformerDecoderLayer(8, 2, batch_first=True).eval())
    assert isinstance(layer.linear1, Int8Linear)
    assert layer(torch.randn(1, 3, 8), torch.randn(1, 3, 8)).shape == (1, 3, 8)


def test_layers_elsewhere_than_on_the_cpu_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=facts_pattern("1 layers", "CPU", "1")):
        replace_linear_by_int8(model)
    assert isinstance(model[0], nn.Linear)


def test_layers_without_real_weights_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(
        ValueError, match=facts_pattern("1 layers", "weights (1", "torch.complex64")
    ):
        replace_linear_by_int8(model)
    assert type(model[0]) is nn.Linear
    with pytest.raises(
        TypeError, match=r"replace_linear_by_int8: the model is a NoneType; pass a torch.nn.Module"
    ):
        replace_linear_by_int8(None)


@pytest.mark.parametrize(
    ("replace", "package"),
    [(replace_linear_by_bnb, "bitsandbytes"), (replace_linear_by_bminf, "bminf")],
)
def test_a_library_that_is_absent_is_named(monkeypatch, replace, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.nn", None)
    model = net()
    with pytest.raises(ImportError, match=f"needs {package}, which cannot be imported") as caught:
        replace(model)
    assert f"pip install {package}, or use replace_linear_by_int8" in str(caught.value)
    assert isinstance(model[0], nn.Linear)


class EightBit(nn.Linear):
    """Takes what Linear8bitLt takes."""

    def __init__(self, d_in, d_out, bias=True, has_fp16_weights=True, threshold=0.0):
        super().__init__(d_in, d_out, bias)
        self.asked = has_fp16_weights, threshold


class Quantized(nn.Module):
    """Takes what QuantizedLinear takes."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return self.linear(x)


def test_layers_of_other_libraries_take_the_place_of_linear(monkeypatch):
    """Through modules of the libraries' names, so that calls and arguments are seen."""
    bnb, bminf = types.ModuleType("bitsandbytes"), types.ModuleType("bminf")
    layers = types.ModuleType("bitsandbytes.nn")
    layers.Linear8bitLt, bminf.QuantizedLinear = EightBit, Quantized
    for module in (bnb, layers, bminf):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    x, want = torch.randn(3, 32), net()
    model = net()
    assert replace_linear_by_bnb(model) is model and not model[0].training
    assert [type(m) for m in model] == [EightBit, nn.ReLU, EightBit]
    assert model[0].asked == (False, 6.0) and model[2].bias is None
    assert torch.equal(model(x), want(x))
    again = model[0]
    assert replace_linear_by_bnb(model)[0] is again, "int8 already"
    assert replace_linear_by_bnb(net(), {"threshold": 1.0})[0].asked == (True, 1.0)
    model = net()
    assert replace_linear_by_bminf(model) is model
    assert isinstance(model[2], Quantized) and torch.equal(model(x), want(x))


# Before 0.50 it warns that float32 inputs are rounded to float16.
@pytest.mark.filterwarnings("ignore:MatMul8bitLt. inputs will be cast:UserWarning")
def test_bitsandbytes_for_real():
    """Its CPU library: int8 weights, and outputs within a few of 127 steps."""
    pytest.importorskip("bitsandbytes", reason="the int8 library is optional")
    x, want = torch.randn(3, 5, 32), net()
    model = replace_linear_by_bnb(net())
    assert model[0].weight.dtype == torch.int8
    y = model(x)
    exact = want(x)
    assert y.dtype == exact.dtype and (y - exact).abs().max() < 0.03 * exact.abs().max()
