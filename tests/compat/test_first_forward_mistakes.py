"""The check of a first forward names the mistakes that are planted in tests/equivalence."""

import pytest
import torch

from tests.equivalence.test_callers import MISTAKES, Planted, small
from torchdistpackage.compat.tensor_parallel.call import tensor_parallel
from torchdistpackage.compat.tensor_parallel.engine import verify
from torchdistpackage.errors import LayoutError


@pytest.mark.few(2)
@pytest.mark.parametrize("wrong", [name for name in MISTAKES if name != "copy"])
def test_a_planted_mistake_is_named(wrong: str, monkeypatch):
    """But for "copy", a mistake of the backward, which is not run."""
    planted = Planted(monkeypatch, wrong)
    planted.inside(verify.BothForwards, "call")
    split = tensor_parallel(small(), ["cpu"] * 2, verify=True)
    with pytest.raises(LayoutError) as met:
        split(input_ids=torch.arange(8).reshape(2, 4))
    assert planted.expected in str(met.value)
