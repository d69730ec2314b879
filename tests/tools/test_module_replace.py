"""Modules by rule: at any depth, the root, and shared ones, which stay shared."""

from __future__ import annotations

import pytest
from torch import nn

from torchdistpackage import replace_all_module


def is_linear(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def scaled(name: str, module: nn.Linear) -> nn.Module:
    return nn.Bilinear(module.in_features, 1, module.out_features)


def test_children_at_any_depth_are_picked_by_their_own_name():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 4)))
    asked = []

    def picks(name: str, module: nn.Module) -> bool:
        asked.append((name, type(module).__name__))
        return name == "1" and isinstance(module, nn.Linear)

    first = model[0]
    assert replace_all_module(model, picks, scaled) is model
    assert model[0] is first and isinstance(model[1][1], nn.Bilinear)
    assert asked == [
        *[("", "Sequential"), ("0", "Linear"), ("1", "Sequential")],
        *[("0", "ReLU"), ("1", "Linear")],
    ]


def test_a_shared_module_stays_one():
    """Also under two names of one parent, and where the rule picks it at one place only."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict(
        {"a": shared, "b": nn.ModuleDict({"left": shared, "right": shared}), "c": nn.Linear(2, 2)}
    )
    made = []

    def make(name: str, module: nn.Module) -> nn.Module:
        made.append(module)
        return nn.Identity()

    replace_all_module(model, lambda name, module: name in ("right", "c"), make)
    assert model["a"] is model["b"]["left"] is model["b"]["right"] is not model["c"]
    assert len(made) == 2 and isinstance(model["a"], nn.Identity)


def test_the_root_is_replaced_and_returned():
    new = replace_all_module(nn.Linear(2, 5), is_linear, scaled)
    assert isinstance(new, nn.Bilinear) and new.out_features == 5


def test_children_of_what_is_replaced_are_not_visited():
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2), nn.Linear(4, 4))
    seen = []

    def picks(name: str, module: nn.Module) -> bool:
        seen.append(type(module))
        return isinstance(module, nn.TransformerEncoderLayer)

    replace_all_module(model, picks, lambda name, module: nn.Identity())
    assert seen == [nn.Sequential, nn.TransformerEncoderLayer, nn.Linear]


def test_a_maker_that_makes_no_module_changes_nothing():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(2, 2))
    before = list(model)

    def make(name: str, module: nn.Linear) -> object:
        return nn.Identity() if name == "0" else module.weight.tolist()

    with pytest.raises(TypeError, match=r"get_new_module\('1', Linear\) returned a list; return"):
        replace_all_module(model, is_linear, make)
    assert list(model) == before
    with pytest.raises(TypeError, match=r"the model is a list; pass a torch.nn.Module"):
        replace_all_module([], is_linear, make)
