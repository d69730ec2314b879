"""Proposed placements: near the best there is, within the memory, and they run."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.compat.placed.test_programs import at
from torchdistpackage.compat.placed.placement_search import (
    PlacedNode,
    PlaceLink,
    bytes_of,
    placements,
    search,
    step_seconds,
)
from torchdistpackage.errors import PlacementError

LINK = PlaceLink(latency_s=0.01, bytes_per_s=1e9)


def random_nodes(seed: int, num: int) -> list[PlacedNode]:
    draw = random.Random(seed)
    return [
        PlacedNode(
            f"n{i}",
            draw.uniform(0.1, 1),
            draw.uniform(0.2, 2),
            draw.randrange(1, 400_000_000),
            draw.randrange(1, 1000),
            draw.randrange(1, 1000),
            tuple(sorted(draw.sample(range(i), min(i, draw.randint(1, 2))))),
        )
        for i in range(num)
    ]


def brute_force(nodes: list[PlacedNode], memory: list[int]) -> float:
    """The shortest step of all placements that fit."""
    best = float("inf")
    for places in itertools.product(range(len(memory)), repeat=len(nodes)):
        held = bytes_of(nodes, places, len(memory))
        if all(h <= limit for h, limit in zip(held, memory, strict=True)):
            best = min(best, step_seconds(nodes, places, LINK))
    return best


@pytest.mark.parametrize("exhaustive", [True, False])
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(s, marks=pytest.mark.full) for s in range(3, 30))]
)
def test_a_proposal_is_within_five_percent_of_the_best(seed, exhaustive):
    """Also where not all placements are tried, as in larger graphs."""
    num, places = 5 + seed % 4, 2 + seed % 2
    nodes = random_nodes(seed, num)
    whole = bytes_of(nodes, [0] * num, 1)[0]
    share = whole if seed % 3 == 0 else int(whole * 0.75)
    memory = [share] * places if seed % 5 else [whole, share, share][:places]
    best = brute_force(nodes, memory)
    if best == float("inf"):
        with pytest.raises(PlacementError, match="do not fit"):
            search(nodes, memory, LINK, exhaustive=exhaustive)
        return
    found = search(nodes, memory, LINK, exhaustive=exhaustive)
    held = bytes_of(nodes, found, places)
    assert all(h <= limit for h, limit in zip(held, memory, strict=True))
    assert step_seconds(nodes, found, LINK) <= 1.05 * best


def test_equal_places_are_tried_once():
    assert len(list(placements(8, (5,) * 8))) == 4140  # Bell's number
    assert len(list(placements(3, (5, 7)))) == 8
    assert len(list(placements(2, (5, 7, 5)))) == 5  # 00 01 02 10 11, and 20 is 02


def test_two_branches_and_a_chain_are_timed_as_the_ranks_run_them():
    one = PlacedNode("a", 1.0, 2.0, 0, 0, 0, ())
    two = PlacedNode("b", 1.0, 2.0, 0, 0, 0, ())
    join = PlacedNode("c", 0.5, 0.5, 0, 0, 0, (0, 1))
    free = PlaceLink(0.0, 1e9)
    assert step_seconds([one, two, join], (0, 1, 0), free) == 4.0
    assert step_seconds([one, two, join], (0, 0, 0), free) == 7.0
    slow = PlaceLink(0.25, 1e9)
    assert step_seconds([one, two, join], (0, 1, 0), slow) == 4.5


def test_what_does_not_fit_is_refused_with_numbers():
    nodes = [PlacedNode(f"n{i}", 1, 1, 0, 3 << 30, 0, ()) for i in range(3)]
    text = r"place 0 would hold 6 of 4 GiB.*the largest node is n0"
    with pytest.raises(PlacementError, match=text):
        search(nodes, [4 << 30] * 2, LINK)


def proposed() -> dict:
    """A model of two branches: proposed, applied, and trained one step beside the plain one."""
    import torch
    from torch import nn

    from torchdistpackage.compat.placed import DeviceFunctor, propose

    torch.set_default_dtype(torch.float64)

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Sequential(nn.Linear(40, 160), nn.Tanh(), nn.Linear(160, 40))
            self.right = nn.Sequential(nn.Linear(40, 160), nn.Tanh(), nn.Linear(160, 40))
            self.head = nn.Linear(80, 3)
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x, y=None):
            joined = torch.cat([self.left(x), self.right(x).view(-1, 40)], dim=1)
            return {"logits": self.head(joined) * self.scale}

    torch.manual_seed(1)
    model, plain = Branches(), Branches()
    plain.load_state_dict(model.state_dict())
    x, labels = torch.randn(32, 40), torch.randint(0, 3, (32,))
    # each rank measures for itself, so one of them says where all goes
    proposal = propose(model, x, memory_gb=1e-3, num_places=2, repeats=1, max_nodes=7)
    assert len(proposal.nodes) == 7 and max(proposal.held_bytes) <= 1e-3 * 2**30
    with pytest.raises(PlacementError, match="do not fit"):
        propose(model, x, memory_gb=1e-5, repeats=1)
    F = DeviceFunctor(["cpu", "cpu"])
    proposal = proposal.agreed(F)
    placed = proposal.apply(F)
    optimizer = F.optimizer(torch.optim.SGD, placed.parameters(), lr=0.1)
    assert placed.eval() is placed.train() is placed
    logits = placed(x)["logits"]
    loss = at(F, F.place(1), nn.functional.cross_entropy)(logits, at(F, F.place(0), labels))
    loss.backward()
    nn.functional.cross_entropy(plain(x)["logits"], labels).backward()
    grads = {n: p.grad for n, p in plain.named_parameters()}
    names = {id(p): n for n, p in model.named_parameters()}
    mine = {names[id(p)] for p in placed.parameters()}
    for p in placed.parameters():
        torch.testing.assert_close(p.grad, grads[names[id(p)]], rtol=1e-9, atol=1e-12)
    optimizer.step()
    F.finish()
    return {"places": proposal.places, "mine": mine, "all": set(grads), "text": str(proposal)}


def test_a_proposal_runs(ranks):
    first, second = ranks(2).run(proposed)
    assert first["places"] == second["places"] and first["text"] == second["text"]
    assert first["mine"] | second["mine"] == first["all"]
    assert not first["mine"] & second["mine"]
    assert "place 1:" in first["text"] and " ms a step" in first["text"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": len}, "the model is a builtin_function_or_method"),
        ({"memory_gb": []}, r"memory_gb=\[\]"),
        ({"memory_gb": "1"}, "memory_gb='1'"),
        ({"memory_gb": float("nan"), "repeats": 0}, "memory_gb=nan; .*; repeats=0 .* 1 or more"),
        ({"num_places": 0}, "memory_gb=1; give gigabytes above 0"),
        ({"memory_gb": [1, 1], "num_places": 3}, "2 values of memory_gb for 3 places"),
        ({"example": ()}, r"takes input; 0 values .* missing: \['input'\]"),
        ({"example": (1, 2)}, "takes input; 2 values were given by position"),
    ],
)
def test_what_cannot_be_proposed_is_refused(options, text):
    import torch

    from torchdistpackage.compat.placed import propose

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    given = {"model": model, "example": torch.ones(1, 2), "memory_gb": 1, **options}
    with pytest.raises(PlacementError, match=text):
        propose(given.pop("model"), given.pop("example"), **given)


def test_a_placed_model_takes_what_the_model_does():
    import torch

    from torchdistpackage.compat.placed import DeviceFunctor, propose

    class Sum(torch.nn.Module):
        def forward(self, x, y, scale=2.0):
            return (x + y) * scale

    x = torch.ones(3)
    placed = propose(Sum(), (x, x), memory_gb=1).apply(F := DeviceFunctor(["cpu"]))
    assert placed(x, y=x).full().tolist() == [4.0] * 3
    assert placed(x, x, 3.0).full().tolist() == [6.0] * 3
    with pytest.raises(PlacementError, match=r"missing: \['y'\], unknown: \['z'\]"):
        placed(x, z=x)
    with pytest.raises(PlacementError, match=r"takes x, y, scale.* given twice: \['x'\]"):
        placed(x, x, x=x)
    F.finish()


def test_a_link_is_of_numbers_that_can_be():
    for wrong in ((-1, 1e9), (0, 0), (float("nan"), 1e9)):
        with pytest.raises(PlacementError, match="a link of latency_s"):
            PlaceLink(*wrong)
