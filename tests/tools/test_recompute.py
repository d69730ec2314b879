"""Proposals are held against every subset of 12 blocks, and against bytes that are counted."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from torch import nn

from tests.ddp.allocated import Meter
from tests.tells import facts_pattern
from torchdistpackage import (
    ConfigError,
    checkpoint_modules,
    get_model_profile,
    propose_recompute,
)
from torchdistpackage.tools.recompute import uncheckpoint_modules


def invented(seed: int, num_blocks: int = 12) -> dict[str, dict[str, float]]:
    draw = random.Random(seed)
    blocks = {
        f"blocks.{i}": {"fwd_time": draw.uniform(1, 9), "fwd_mem": draw.uniform(5, 300)}
        for i in range(num_blocks)
    }
    total = sum(b["fwd_mem"] for b in blocks.values())
    return {"root": {"fwd_time": 99.0, "fwd_mem": total + 50}, **blocks}


def brute_force(profile: dict, limit_mb: float) -> float:
    """The least time of all subsets of the blocks."""
    blocks = [entry for name, entry in profile.items() if name != "root"]
    costs = [
        sum(b["fwd_time"] for b in chosen)
        for n in range(len(blocks) + 1)
        for chosen in itertools.combinations(blocks, n)
        if profile["root"]["fwd_mem"] - sum(b["fwd_mem"] for b in chosen) <= limit_mb
    ]
    return min(costs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.15, 0.5, 0.9])
def test_no_choice_of_12_blocks_is_cheaper(seed, share):
    profile = invented(seed)
    limit_mb = profile["root"]["fwd_mem"] * share
    plan = propose_recompute(profile, limit_mb / 1e3)
    best = brute_force(profile, limit_mb)
    chosen = [profile[name] for name in plan]
    kept = profile["root"]["fwd_mem"] - sum(b["fwd_mem"] for b in chosen)
    assert kept <= limit_mb * 1.0001 and plan.memory_gb == pytest.approx(kept / 1e3)
    assert plan.time_ms == pytest.approx(sum(b["fwd_time"] for b in chosen))
    assert plan.time_ms == pytest.approx(best), "the best, so at most 1.05 of it"


def test_parts_of_a_block_are_chosen_where_they_free_more_a_millisecond():
    """Against all sets of modules none of which is inside another."""
    profile = invented(5, 4)
    draw = random.Random(6)
    for name in [name for name in profile if name != "root"]:
        for part in ("attention", "mlp"):
            share = draw.uniform(0.1, 0.6)
            profile[f"{name}.{part}"] = {
                "fwd_time": profile[name]["fwd_time"] * draw.uniform(0.1, 0.6),
                "fwd_mem": profile[name]["fwd_mem"] * 0.9,
                "freed_mem": profile[name]["fwd_mem"] * share,
            }
    names = [name for name in profile if name != "root"]
    freed = {n: profile[n].get("freed_mem", profile[n]["fwd_mem"]) for n in names}
    total = profile["root"]["fwd_mem"]
    for limit_mb in (0.3 * total, 0.6 * total, 0.8 * total):
        best = min(
            sum(profile[n]["fwd_time"] for n in chosen)
            for k in range(5)
            for chosen in itertools.combinations(names, k)
            if not any(a.startswith(f"{b}.") for a, b in itertools.permutations(chosen, 2))
            and total - sum(freed[n] for n in chosen) <= limit_mb
        )
        plan = propose_recompute(profile, limit_mb / 1e3)
        # 5 parts or more can be cheaper still than what is tried here
        assert plan.time_ms <= best + 1e-9 and total - sum(freed[n] for n in plan) <= limit_mb


def test_a_large_model_is_thinned_and_stays_close():
    """96 blocks of three parts: no time to try all; nearly as cheap as the best fraction."""
    profile = invented(7, 96)
    limit_mb = profile["root"]["fwd_mem"] * 0.5
    plan = propose_recompute(profile, limit_mb / 1e3)
    assert plan.memory_gb <= limit_mb / 1e3 * (1 + 1e-9)
    blocks = sorted(
        (b for n, b in profile.items() if n != "root"), key=lambda b: b["fwd_time"] / b["fwd_mem"]
    )
    excess, bound_ms = profile["root"]["fwd_mem"] - limit_mb, 0.0
    for block in blocks:  # parts of a block allowed: no set of blocks costs less
        share = min(1.0, excess / block["fwd_mem"])
        bound_ms, excess = bound_ms + share * block["fwd_time"], excess - share * block["fwd_mem"]
    assert plan.time_ms <= 1.05 * bound_ms


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(dim), nn.Linear(dim, hidden)
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(self.drop(torch.tanh(self.up(self.norm(x)))))


def net() -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block(32, 32 * (1 + i % 4)) for i in range(12)]
    return nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 4)).double()


def kept_mb(model: nn.Module, x: torch.Tensor) -> float:
    """Bytes alive after a forward, counted at every operation; the input was there before."""
    meter = Meter()
    output = meter.run(model, x)
    return (meter.now - output.nbytes + x.nbytes) / 1e6


@pytest.mark.few(1)
@pytest.mark.parametrize("share", [0.35, 0.7])
def test_a_proposal_meets_its_memory_and_changes_no_number(share):
    x = torch.randn(64, 20, 16, dtype=torch.float64)
    plain = net()
    profile = get_model_profile(plain, (x,), show=False)
    before = kept_mb(plain, x)
    assert before == pytest.approx(profile["root"]["fwd_mem"], rel=0.01)
    plan = propose_recompute(profile, before * share / 1e3)
    assert plan and set(plan) < set(profile)
    model = checkpoint_modules(net(), plan)
    after = kept_mb(model, x)
    assert after <= 1.1 * before * share
    assert after == pytest.approx(plan.memory_gb * 1e3, rel=0.1)
    grads = []
    for held in (plain, model, copy.deepcopy(model)):
        held.zero_grad()
        torch.manual_seed(3)
        held(x).square().sum().backward()
        grads.append([p.grad for p in held.parameters()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*grads, strict=True))
    assert list(model.state_dict()) == list(plain.state_dict())
    uncheckpoint_modules(model)
    assert kept_mb(model, x) == before


def test_a_copy_is_checkpointed_with_its_own_weights():
    model = checkpoint_modules(nn.Sequential(Block(4, 8)).eval(), ["0"])
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin[0].down.weight)
    x = torch.randn(3, 4)
    assert not torch.equal(twin(x), model(x)) and twin[0].forward.module is twin[0]
    again = twin[0].forward
    assert checkpoint_modules(twin, ["0"])[0].forward is again


def test_nothing_is_recomputed_where_there_is_room():
    profile = invented(1)
    plan = propose_recompute(profile, profile["root"]["fwd_mem"] / 1e3)
    assert plan == () and plan.time_ms == 0 and "recompute nothing" in str(plan)


def test_what_may_not_be_recomputed_stays():
    profile = {
        "root": {"fwd_time": 9.0, "fwd_mem": 100.0},
        "a": {"fwd_time": 1.0, "fwd_mem": 50.0, "has_state": True},
        "b": {"fwd_time": 5.0, "fwd_mem": 50.0, "freed_mem": 45.0},
    }
    assert propose_recompute(profile, 0.06) == ("b",)
    with pytest.raises(ConfigError, match=facts_pattern("0.1 GB", "0.055 GB")):
        propose_recompute(profile, 0.04)
    with pytest.raises(ConfigError, match=facts_pattern("0.1 GB", "0.1 GB")):
        propose_recompute(profile, 0.06, candidates=lambda name: name == "a")


def test_without_a_root_the_modules_at_the_top_are_all():
    profile = {name: entry for name, entry in invented(2).items() if name != "root"}
    total = sum(entry["fwd_mem"] for entry in profile.values())
    assert propose_recompute(profile, 0.5 * total / 1e3).memory_gb <= 0.5 * total / 1e3


@pytest.mark.parametrize(
    ("profile", "memory_gb", "text"),
    [
        ({"root": {"fwd_time": 1.0, "fwd_mem": 2.0}}, 0.0, "memory_gb is 0.0; give gigabytes"),
        ({"root": {"fwd_time": 1.0, "fwd_mem": 2.0}}, float("nan"), "memory_gb is nan"),
        ({}, 1.0, "the profile has no activations"),
        ({"root": {"fwd_time": 1.0, "fwd_mem": 0.0}}, 1.0, "profile a forward with gradients"),
        ({"root": {"fwd_time": 1.0, "fwd_mem": 2.0}}, "1", "memory_gb is '1'; give gigabytes"),
        (None, 1.0, "the profile is a NoneType; pass what"),
        ({"root": {"fwd_time": 1.0}, "a": {}}, 1.0, r"2 of 2 entries lack .* \('root'\)"),
    ],
)
def test_bad_profiles_and_limits_are_refused(profile, memory_gb, text):
    with pytest.raises(ConfigError, match=text):
        propose_recompute(profile, memory_gb)


def test_bad_names_are_refused():
    model = nn.Sequential(Block(2, 2))
    with pytest.raises(ConfigError, match=facts_pattern("1 names", "'0.op'", "0")):
        checkpoint_modules(model, ["0", "0.op"])
    with pytest.raises(ConfigError, match=facts_pattern("0.up", "inside 0")):
        checkpoint_modules(model, ["0.up", "0"])
    with pytest.raises(ConfigError, match=r"0\.up is inside the model, which"):
        checkpoint_modules(model, ["0.up", ""])
    model = nn.ModuleDict({"a": Block(2, 2), "a-b": Block(2, 2)})  # "-" is before "."
    with pytest.raises(ConfigError, match=r"a\.up is inside a, which"):
        checkpoint_modules(model, ["a", "a-b", "a.up"])
