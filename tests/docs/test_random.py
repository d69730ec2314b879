"""The noise of docs/random.md: equal on all ranks that hold a parameter, whatever the layout."""

import re
from pathlib import Path

import torch

from torchdistpackage.comm.tpc import tpc
from torchdistpackage.parallel import ColumnLinear

PAGE = Path(__file__).parents[2] / "docs" / "random.md"


def draw(axes: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
    """The noise of a column-split layer and of a replicated norm on this rank."""
    (code,) = (
        x
        for x in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "def noise" in x
    )
    names: dict = {}
    exec(code, names)  # noqa: S102  # the page's own code
    tpc.setup_process_groups(axes)
    model = torch.nn.Sequential(ColumnLinear(4, 6), torch.nn.LayerNorm(6)).double()
    state = torch.get_rng_state()
    found = names["noise"](model, 7, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(found["0.weight"], names["noise"](model, 7, 4)["0.weight"])
    return found


def test_noise_is_that_of_one_process_on_every_layout(ranks):
    (whole,) = ranks(1).run(draw, [("data", 1)])
    replicas = ranks(2).run(draw, [("data", 2)])
    assert all(torch.equal(part[name], whole[name]) for part in replicas for name in whole)
    parts = ranks(2).run(draw, [("tensor", 2)])
    assert torch.equal(torch.cat([part["0.weight"] for part in parts]), whole["0.weight"])
    assert torch.equal(torch.cat([part["0.bias"] for part in parts]), whole["0.bias"])
    assert all(torch.equal(part["1.weight"], whole["1.weight"]) for part in parts)
    assert whole["0.weight"].std() > 0.5
