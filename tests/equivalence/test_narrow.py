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
    # in the backward of the cast nothing runs that has a name
    assert next(iter(casts.items())) == ("1", "bfloat16") and not singles
    model[1] = Rounded(torch.float32)
    assert casts_of(model, x) == ({}, ["1"])
    model[1] = nn.LayerNorm(8).double()
    assert casts_of(model, x) == ({}, [])
