"""Casts that code makes by itself are found in the module that makes them."""

import torch
from torch import Tensor, nn

from torchdistpackage.equivalence.narrow import noting_casts
from torchdistpackage.equivalence.record import parts_of


class Rounded(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(x.dtype)


def casts_of(model: nn.Module, x: Tensor) -> tuple[dict[str, str], list[str]]:
    casts, singles = dict[str, str](), list[str]()
    with noting_casts(parts_of(model), casts, singles):
        model(x).sum().backward()
    return casts, singles


def test_a_cast_is_named_by_its_module():
    x = torch.randn(4, 8, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(8, 8), Rounded(torch.bfloat16), nn.Linear(8, 8)).double()
    casts, singles = casts_of(model, x)
    assert next(iter(casts.items())) == ("1", "bfloat16") and not singles
    model[1] = Rounded(torch.float32)
    assert casts_of(model, x) == ({}, ["1"])
    model[1] = nn.LayerNorm(8).double()
    assert casts_of(model, x) == ({}, [])


def tables(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


class Rotated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * tables(x)


def test_a_cast_outside_of_modules_is_named_by_the_function_that_the_model_calls():
    x = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    casts, _ = casts_of(Rotated(), x)
    assert next(iter(casts.items())) == ("tables", "bfloat16")


def test_what_is_compiled_runs_as_it_was_written():
    model = nn.Sequential(nn.Linear(2, 2), Rounded(torch.bfloat16)).double()
    model[1].compile(backend="eager", fullgraph=True)
    casts, _ = casts_of(model, torch.ones(2, 2, dtype=torch.float64))
    assert casts["1"] == "bfloat16"
